"""SimCLR: all views of a batch through one network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from dipole.core.contrast.embedded import Embedded
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError
from dipole.core.ground.transfer import generator
from dipole.vision.frameworks.base import (
    Batch,
    Build,
    OneBranch,
    Related,
    Setup,
    instances,
    register_framework,
)

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig


@register_framework("simclr")
class SimCLR(OneBranch):
    """One network for all views; negatives are the rest of the batch (Chen et al. 2020).

    With more than two views this is the K x (1 against M) form that CACR calls CMC. negatives: so many per anchor,
    drawn from the batch of all ranks; None for all.
    """

    negatives_mean = "so many of the batch's per anchor"

    def __init__(self, build: Build, channels: int, tap: str | None, negatives: int | None = None) -> None:
        super().__init__(build, channels, tap)
        self.negatives = negatives

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        most = config.count * (setup.batch_size - 1)
        if config.negatives is not None and config.negatives > most:
            raise ConfigError(
                f"vision.negatives: a batch of {setup.batch_size} with {config.count} views has {most} negatives per "
                f"anchor, fewer than {config.negatives}; raise train.batch_size, or take method = 'moco' with a queue."
            )
        return cls(setup.build, setup.images.channels, config.encoder.tap, config.negatives)

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        if views > 1:
            yield "simclr", Pairs.from_views([rows(images) for _ in range(views)], labels)

    def forward(self, batch: Batch) -> Embedded:
        # One pass: batch norm sees all views together, as in the reference.
        z = self.branch(torch.cat(batch.views))
        count, negatives, seed = len(batch.views), self.negatives, batch.seed

        def relate(rows: dict[str, Tensor]) -> Pairs:
            views = [rows[f"view{number}"] for number in range(count)]
            pairs = Pairs.from_views(views, rows.get("labels"), rows["index"])
            return pairs if negatives is None else keep_negatives(pairs, negatives, seed)

        views = {f"view{number}": view for number, view in enumerate(z.chunk(count))}
        return Embedded({**views, **instances(batch, z)}, relate)


def keep_negatives(pairs: Pairs, count: int, seed: int) -> Pairs:
    """Drop random negatives of every anchor until `count` are left; LMCL and CLLR vary this number (Fig. 4)."""
    anchors, candidates = len(pairs.anchors), len(pairs.candidates)
    device = pairs.anchors.device
    rank = torch.rand(anchors, candidates, generator=generator(seed, device), device=device)
    rank.scatter_(1, pairs.excluded, 2.0)  # behind all negatives
    return pairs.without(rank.argsort(1)[:, count : candidates - pairs.excluded.shape[1]], distinct=True)
