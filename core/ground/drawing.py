"""Figures without a display; matplotlib is needed by who draws alone."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dipole.core.ground.errors import ConfigError
from dipole.core.ground.extras import install_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawing() -> None:
    """ConfigError where matplotlib is missing, before work is done whose picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"pictures need the package 'matplotlib', which is not installed. Install it with: {install_line('vision')}"
        )


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches."""
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
