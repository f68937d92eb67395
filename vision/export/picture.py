"""The picture of a query and its mini-batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dipole.core.contrast.objective import Composite
    from dipole.vision.adapter import VisionAdapter


def export(adapter: "VisionAdapter", folder: Path, record: Any, objective: "Composite | None") -> None:
    """Write query.png."""
    adapter.draw(folder / "query.png", objective, f"{record.epochs:g} epochs")
