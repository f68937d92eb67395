"""Figures without a display; matplotlib is needed by who draws alone."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawing(extra: str = "vision") -> None:
    """ConfigError where matplotlib is missing, before work is done whose picture could not be drawn.

    extra: whose picture it is, and which installs it.
    """
    if find_spec("matplotlib") is None:
        raise _missing(extra)


def new_figure(width: float, height: float, extra: str = "vision") -> "Figure":
    """An empty figure of so many inches."""
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
