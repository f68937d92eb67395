"""Which frameworks can carry an objective: asked of tiny batches when one of them could not."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dipole.core.contrast.objective import Composite
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import PairsError
from dipole.vision.methods import both_directions, crops

IMAGES, QUEUE = 6, 8
MOST_VIEWS = 12


def samples(views: int, dim: int, device: torch.device) -> Iterator[tuple[str, Pairs]]:
    """Pairs as every framework makes them from labelled images with `views` views, or blocks of `views` images."""

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, device=device, generator=torch.Generator(device).manual_seed(0))

    labels = torch.arange(IMAGES, device=device) % 2
    if views > 1:
        yield "simclr", Pairs.from_views([rows(IMAGES) for _ in range(views)], labels)
        yield "moco", Pairs.cross(rows(IMAGES), rows(IMAGES, views - 1), rows(QUEUE), labels=labels)
        z = rows(views * IMAGES)
        yield "swav", crops(z, z, None, IMAGES, views, labels)
        yield "swav with a queue", crops(z, z, rows(QUEUE), IMAGES, views, labels)
        classes = torch.arange(IMAGES // 2, device=device)
        yield "blocks", Pairs.from_blocks(rows(IMAGES // 2, views), anchors="all", labels=classes)
    yield "cmc", both_directions(rows(2 * IMAGES), IMAGES, None, labels)


@torch.no_grad()
def carriers(objective: Composite, views: int, dim: int, device: torch.device) -> dict[str, int]:
    """Framework -> the number of views it needs (those there are, if they do) to carry an objective."""
    found: dict[str, int] = {}
    for count in (views, *range(2, MOST_VIEWS + 1)):
        for name, pairs in samples(count, dim, device):
            if name not in found and _carries(objective, pairs):
                found[name] = count
    return found


def _carries(objective: Composite, pairs: Pairs) -> bool:
    try:
        objective(pairs)
    except PairsError:
        return False
    return True


def explain(objective: Composite, method: str, views: int, dim: int, device: torch.device) -> str:
    """What can carry the objective instead, as a sentence."""
    found = carriers(objective, views, dim, device)
    if not found:
        return f"No vision.method can carry {objective}."
    listed = [_setting(name, count, views) for name, count in found.items()]
    return f"vision.method = {method!r} cannot carry {objective} as it is set; these can: {', '.join(listed)}."


def _setting(name: str, count: int, views: int) -> str:
    """A framework, and what has to be set besides it: the size of a block always, views where they are others."""
    if name == "blocks":
        return f"blocks (blocks.size = {count})"
    return name if name == "cmc" or count == views else f"{name} (views = {count})"
