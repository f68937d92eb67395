"""Which frameworks can carry an objective, tried on random rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.vision.augment import MOST_VIEWS
from dipole.vision.frameworks import Method, by_name
from dipole.vision.frameworks.base import AnyPairs
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
    """Return the frameworks that can carry an objective, and the number of views that each needs.

    The number is `views` if that suffices.

    images: leaves out frameworks that cannot train on them; their labels are used. Default: two classes.
    """
    labels: Tensor | None = torch.arange(batch_size) % 2
    if images is not None:
        labels = images.labels
    if labels is not None:
        # A spread over all classes.
        labels = labels.sort().values[torch.linspace(0, len(labels) - 1, batch_size).long()].to(device)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, device=device, generator=torch.Generator(device).manual_seed(0))

    found: dict[str, int] = {}
    for count in dict.fromkeys((views, 2, (objective.positives_wanted or 1) + 1)):
        for method in _able(images, count):
            for name, pairs in method.samples(count, batch_size, rows, labels):
                if name not in found and _carries(objective, pairs):
                    found[name] = count
    return found


def _able(images: ImageSet | None, views: int) -> Iterator[type[Method]]:
    """Yield the frameworks that can train on images with a number of views."""
    for method in by_name().values():
        if "augmented" not in method.pairs or (method.positives_key == "views" and views > MOST_VIEWS):
            continue
        try:
            if images is not None:
                method.check_images(images)
        except ConfigError:
            continue
        yield method


def example(
    objective: Composite, dim: int, method: str, views: int, batch_size: int, by_label: bool = False
) -> AnyPairs:
    """Return pairs of random rows of two classes, made as a framework pairs a batch, or by their labels."""
    labels = (torch.arange(batch_size) % 2).sort().values
    if by_label:
        return Pairs.from_labels([torch.randn(batch_size, dim) for _ in range(views)], labels)
    samples = by_name()[method].samples(views, batch_size, lambda *shape: torch.randn(*shape, dim), labels)
    return next(samples)[1]


def _carries(objective: Composite, pairs: AnyPairs) -> bool:
    try:
        outcome = objective(pairs)
    except PairsError:
        return False
    return not any(term.note for term in outcome.terms.values())  # a note means that a term stays 0


def explain(
    objective: Composite,
    method: str,
    views: int,
    dim: int,
    device: torch.device,
    images: ImageSet,
    batch_size: int,
) -> str:
    """Return a sentence that names the frameworks that can carry the objective."""
    found = carriers(objective, views, dim, device, images, batch_size)
    if not found:
        return f"No vision.method can carry {objective} on these images in batches of {batch_size}."
    listed = [_setting(name, count, views) for name, count in found.items()]
    return f"vision.method = {method!r} cannot carry {objective} as it is set; these can: {', '.join(listed)}."


def _setting(name: str, count: int, views: int) -> str:
    """Return a framework with the setting that gives it enough positives, if it is not set already."""
    method = by_name()[name.partition(" ")[0]]
    key = method.positives_key
    if not key or (key == "views" and count == views):
        return name
    return f"{name} ({key} = {count - (not method.counts_anchor)})"
