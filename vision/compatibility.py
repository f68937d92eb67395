"""Which frameworks can carry an objective: asked of random rows when one of them could not."""

import torch
from torch import Tensor

from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.vision.frameworks import Method, by_name
from dipole.vision.frameworks.base import MOST_VIEWS, Related
from dipole.vision.image_set import ImageSet

IMAGES = 6


@torch.no_grad()
def carriers(
    objective: Composite,
    views: int,
    dim: int,
    device: torch.device,
    images: ImageSet | None = None,
    batch_size: int = IMAGES,
) -> dict[str, int]:
    """Framework -> the number of views it needs (those there are, if they do) to carry an objective.

    images: leaves out frameworks that cannot train on them; their labels are those of the batch. Default: two classes.
    """
    labels = torch.arange(batch_size) % 2 if images is None else images.labels
    if labels is not None:
        # Of all classes, the first and the last among them.
        labels = labels.sort().values[torch.linspace(0, len(labels) - 1, batch_size).long()].to(device)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, device=device, generator=torch.Generator(device).manual_seed(0))

    found: dict[str, int] = {}
    for count in dict.fromkeys((views, 2, (objective.positives_wanted or 1) + 1)):
        for method in by_name().values():
            if "augmented" not in method.pairs or (images is not None and not _trains_on(method, images)):
                continue
            if method.positives_key == "views" and count > MOST_VIEWS:
                continue
            for name, pairs in method.samples(count, batch_size, rows, labels):
                if name not in found and _carries(objective, pairs):
                    found[name] = count
    return found


def example(
    objective: Composite, dim: int, method: str, views: int, batch_size: int, by_label: bool = False
) -> Related:
    """Random rows of so many images, paired as a framework pairs a batch, or by their labels; of two classes."""
    labels = (torch.arange(batch_size) % 2).sort().values
    if by_label:
        return Pairs.from_labels([torch.randn(batch_size, dim) for _ in range(views)], labels)
    framework = by_name()[method]
    found = framework.samples(views, batch_size, lambda *shape: torch.randn(*shape, dim), labels)
    return next(iter(found))[1]


def _trains_on(method: type[Method], images: ImageSet) -> bool:
    try:
        method.check_images(images)
    except ConfigError:
        return False
    return True


def _carries(objective: Composite, pairs: Related) -> bool:
    try:
        outcome = objective(pairs)
    except PairsError:
        return False
    return not any(term.note for term in outcome.terms.values())  # none stays 0


def explain(
    objective: Composite,
    method: str,
    views: int,
    dim: int,
    device: torch.device,
    images: ImageSet,
    batch_size: int,
) -> str:
    """What can carry the objective instead, as a sentence."""
    found = carriers(objective, views, dim, device, images, batch_size)
    if not found:
        return f"No vision.method can carry {objective} on these images in batches of {batch_size}."
    listed = [_setting(name, count, views) for name, count in found.items()]
    return f"vision.method = {method!r} cannot carry {objective} as it is set; these can: {', '.join(listed)}."


def _setting(name: str, count: int, views: int) -> str:
    """A framework, and what has to be set besides it: the size of a block always, views where they are others."""
    method = by_name()[name.partition(" ")[0]]
    key = method.positives_key
    if not key or (key == "views" and count == views):
        return name
    return f"{name} ({key} = {count if method.counts_anchor else count - 1})"
