"""The picture of a query and its mini-batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipole.core.train.card import Card, write_card
from dipole.core.utils.text import counted

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite
    from dipole.vision.adapter import VisionAdapter


def export(adapter: "VisionAdapter", folder: Path, record: Any, objective: "Composite | None") -> None:
    """Write query.png and README.md."""
    adapter.draw(folder / "query.png", objective, counted(record.epochs, "epoch"))
    what = "`query.png`: a query beside its positives and the negatives of greatest and least weight."
    card = Card(what, f"dipole export {record.hash} --to picture", "image-feature-extraction", tags=("vision",))
    write_card(folder, card, record, adapter.data_info())
