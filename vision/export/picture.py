"""The picture of a query and its mini-batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipole.core.train.card import Card, write_card
from dipole.core.utils.text import counted
from dipole.vision.trained_model import TrainedModel

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite


def export(model: TrainedModel, folder: Path, record: Any, objective: "Composite | None") -> None:
    """Write query.png and README.md."""
    model.draw(folder / "query.png", objective, counted(record.epochs, "epoch"))
    what = "`query.png`: a query, its positives, and the negatives of greatest and least weight."
    card = Card(what, f"dipole export {record.hash} --to picture", "image-feature-extraction", tags=("vision",))
    write_card(folder, card, record, model.info)
