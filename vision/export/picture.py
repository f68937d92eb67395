"""The picture of a query and its mini-batch."""

from pathlib import Path
from typing import Any

from dipole.core.train.exports import Card
from dipole.core.utils.text import counted
from dipole.vision.export import TrainedModel


def export(model: TrainedModel, folder: Path, record: Any, objective: Any) -> Card:
    """Write query.png."""
    model.draw(folder / "query.png", objective, counted(record.epochs, "epoch"))
    what = "`query.png`: a query, its positives, and the negatives of greatest and least weight."
    return Card(what, f"dipole export {record.hash} --to picture", "image-feature-extraction", tags=("vision",))
