"""Figures without a display. matplotlib is imported only when a figure is drawn."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawing(extra: str = "vision") -> None:
    """Raise ConfigError if matplotlib is missing. Call this before long work.

    extra: installs matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise _missing(extra)


def new_figure(width: float, height: float, extra: str = "vision") -> "Figure":
    """Return an empty figure. Width and height are in inches."""
    check_drawing(extra)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing(extra) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _missing(extra: str) -> ConfigError:
    line = install_line(extra)
    return ConfigError(f"pictures need the package 'matplotlib', which is not installed. Install it with: {line}")
