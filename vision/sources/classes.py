"""Only the classes of a list, in its order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.text import counted
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes


def wanted_rows(name: str, labels: Tensor, names: Sequence[str], wanted: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Rows of the wanted classes, and their labels in the order of `wanted`."""
    missing = [each for each in wanted if each not in names]
    if missing:
        raise DataError(
            f"{name} lacks {counted(len(missing), 'class', 'classes')} of the class list: {', '.join(missing[:5])}."
            f"{nearest(missing[0], names)} It has {counted(len(names), 'named class', 'classes')}."
        )
    new = torch.full((len(names) + 1,), -1)
    for label, each in enumerate(wanted):
        new[names.index(each)] = label
    mapped = new[labels]
    rows = (mapped >= 0).nonzero().flatten()
    return rows, mapped[rows]


def select(images: ImageSet, wanted: Classes) -> ImageSet:
    """The images of the wanted classes; all of them for None."""
    if wanted is None:
        return images
    if images.labels is None:
        raise DataError(f"{images.name} has no labels, so a class list cannot be applied.")
    rows, labels = wanted_rows(images.name, images.labels, images.class_names, wanted)
    return ImageSet(images.name, images.images[rows], labels, wanted, images.skipped)
