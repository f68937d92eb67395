"""Frameworks, one file each (the folder is listed), and which of them can carry an objective, tried on random rows."""

from functools import partial

import torch
from torch import Tensor

from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.extras import needing
from dipole.core.utils.plugins import import_all

with needing("vision", __name__):
    from dipole.vision.augment import MOST_VIEWS
    from dipole.vision.frameworks.base import FRAMEWORKS, AnyPairs, Framework
    from dipole.vision.image_set import ImageSet

    import_all(__name__)

DEFAULT = "simclr"


def by_name() -> dict[str, type[Framework]]:
    """Return all frameworks: the default first, then those of several views per image, then those of one."""
    names = sorted(FRAMEWORKS, key=lambda name: (name != DEFAULT, bool(FRAMEWORKS[name].single), name))
    return {name: FRAMEWORKS[name] for name in names}


@torch.no_grad()
def carriers(
    objective: Composite, views: int, dim: int, device: torch.device, images: ImageSet, batch_size: int
) -> dict[str, int]:
    """Return the frameworks that can carry an objective on images, and the number of views that each needs."""
    labels = images.labels
    if labels is not None:
        # A spread over all classes.
        labels = labels.sort().values[torch.linspace(0, len(labels) - 1, batch_size).long()].to(device)
    rows = partial(_rows, batch_size, dim, device)
    found: dict[str, int] = {}
    for count in dict.fromkeys((views, 2, (objective.positives_wanted or 1) + 1)):
        for name, framework in by_name().items():
            if name in found or not _can_train(framework, images, count, batch_size):
                continue
            try:
                outcome = objective(framework.sample(count, rows, labels))
            except PairsError:
                continue
            if not any(term.note for term in outcome.terms.values()):  # a note means that a term stays 0
                found[name] = count
    return found


def _rows(count: int, dim: int, device: torch.device | None, *shape: int) -> Tensor:
    return torch.randn(count, *shape, dim, device=device)


def _can_train(framework: type[Framework], images: ImageSet, views: int, batch_size: int) -> bool:
    """Return whether a framework can train on images with a number of views, or of positives and the anchor."""
    most = {"views": MOST_VIEWS, "": None}.get(framework.positives_key, batch_size)
    if "augmented" not in framework.pairs or (most is not None and not 1 < views <= most):
        return False
    try:
        framework.check_images(images)
    except ConfigError:
        return False
    return True


def example(objective: Composite, dim: int, method: str, views: int, batch_size: int, by_label: bool) -> AnyPairs:
    """Return pairs of random rows of two classes, made as a framework pairs a batch, or by their labels."""
    labels = (torch.arange(batch_size) % 2).sort().values
    rows = partial(_rows, batch_size, dim, None)
    if by_label:
        return Pairs.from_labels(list(rows(views).unbind(1)), labels)
    return by_name()[method].sample(views, rows, labels)
