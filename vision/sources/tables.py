"""Tables of the library `datasets` that have a column of images."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.vision.decoding import file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding
from dipole.vision.sources.classes import wanted_rows
from dipole.vision.sources.images import decode_all

LABELS = ("label", "fine_label", "labels", "class", "target", "y")


def columns_of(name: str, features: Any) -> tuple[str, str | None, tuple[str, ...]]:
    """The column of images, that of labels if there is one, and the names of the classes."""
    from datasets import ClassLabel
    from datasets import Image as ImageFeature

    pictures = [key for key, feature in features.items() if isinstance(feature, ImageFeature)]
    if not pictures:
        # Plain parquet without the Hub's metadata: a struct of bytes and path.
        pictures = [key for key, feature in features.items() if isinstance(feature, dict) and "bytes" in feature]
    if not pictures:
        raise DataError(f"{name} has no image column; its columns are {', '.join(features)}.")
    named = [key for key, feature in features.items() if isinstance(feature, ClassLabel)]
    label = next((key for key in LABELS if key in features), named[0] if named else None)
    feature = features[label] if label else None
    return pictures[0], label, tuple(feature.names) if isinstance(feature, ClassLabel) else ()


def from_table(name: str, table: Any, options: Decoding, wanted: Classes) -> ImageSet:
    from datasets import Image as ImageFeature

    features = table.features
    column, label, names = columns_of(name, features)
    labels = None if label is None else integers(name, label, table[label])
    if wanted is not None and labels is not None:
        keep = wanted_rows(name, labels, names, wanted)
        table = table.select(keep[0].tolist())
        labels, names = keep[1], wanted
    raw = table.cast_column(column, ImageFeature(decode=False)) if isinstance(features[column], ImageFeature) else table

    def read(i: int) -> bytes:
        cell = raw[i][column]
        return cell["bytes"] if cell["bytes"] is not None else file_bytes(Path(cell["path"]))

    return decode_all(name, [f"{name}[{i}]" for i in range(len(raw))], read, labels, names, options)


def integers(name: str, column: str, values: Iterable[Any]) -> Tensor:
    """Labels (n,), -1 where there is none."""
    try:
        return torch.tensor([-1 if value is None else int(value) for value in values])
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: the label column {column!r} must hold integers or class labels: {error}.") from error
