"""Figures without a display. matplotlib is imported only when a figure is drawn."""

from typing import TYPE_CHECKING

from dipole.core.utils.extras import needing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawing(extra: str = "vision") -> None:
    """Raise ConfigError if matplotlib, which an extra installs, is missing. Call this before long work."""
    with needing(extra, "drawing pictures"):
        import matplotlib  # noqa: F401


def new_figure(width: float, height: float, extra: str = "vision") -> "Figure":
    """Return an empty figure. Width and height are in inches."""
    check_drawing(extra)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
