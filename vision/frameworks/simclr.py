"""SimCLR: all views of a batch through one network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from dipole.core.contrast.embedded import Embedded
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError
from dipole.core.ground.transfer import generator
from dipole.core.train.config import Settings
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


Repel = Literal["all", "queries", "in-turn"]


class SimCLRConfig(Settings):
    """The [vision.simclr] table."""

    negatives: Repel = Field(
        "all",
        description="who repels: all views of the other images, (K + 1)(M - 1) of them; queries: the first view is the "
        "query, and the other images' queries repel it, M - 1 (CACR Sec. 3.2); in-turn: so for each view in turn",
    )


@register_framework("simclr")
class SimCLR(OneBranch):
    """One network for all views; negatives are the rest of the batch (Chen et al. 2020).

    With more than two views this is the K x (1 against M) form that CACR calls CMC. negatives: so many per anchor,
    drawn from the batch of all ranks; None for all. repel: which rows of the batch they are, as in `SimCLRConfig`.
    """

    table = SimCLRConfig
    negatives_mean = "so many of the batch's per anchor"

    def __init__(
        self, build: Build, channels: int, tap: str | None, negatives: int | None = None, repel: Repel = "all"
    ) -> None:
        super().__init__(build, channels, tap)
        self.negatives = negatives
        self.repel: Repel = repel

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        repel: Repel = config.own_table.negatives
        most = (config.count if repel == "all" else 1) * (setup.batch_size - 1)
        if config.negatives is not None and config.negatives > most:
            raise ConfigError(
                f"vision.negatives: a batch of {setup.batch_size} with {config.count} views has {most} negatives per "
                f"anchor with vision.simclr.negatives = {repel!r}, fewer than {config.negatives}; raise "
                "train.batch_size, or take method = 'moco' with a queue."
            )
        return cls(setup.build, setup.images.channels, config.encoder.tap, config.negatives, repel)

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        if views > 1:
            yield "simclr", Pairs.from_views([rows(images) for _ in range(views)], labels)

    def forward(self, batch: Batch) -> Embedded:
        # One pass: batch norm sees all views together, as in the reference.
        z = self.branch(torch.cat(batch.views))
        count, negatives, repel, seed = len(batch.views), self.negatives, self.repel, batch.seed

        def relate(rows: dict[str, Tensor]) -> Related:
            views = [rows[f"view{number}"] for number in range(count)]
            found = view_pairs(views, rows.get("labels"), rows["index"], repel)
            if negatives is not None:
                found = tuple(keep_negatives(pairs, negatives, seed + n) for n, pairs in enumerate(found))
            return found[0] if len(found) == 1 else found

        views = {f"view{number}": view for number, view in enumerate(z.chunk(count))}
        return Embedded({**views, **instances(batch, z)}, relate)


def view_pairs(views: Sequence[Tensor], labels: Tensor | None, index: Tensor, repel: Repel) -> tuple[Pairs, ...]:
    """Pairs of V views (B, d) of the same images: one, or with "in-turn" one for each view as the query."""
    if repel != "in-turn":
        return (Pairs.from_views(views, labels, index, repel),)
    return tuple(
        Pairs.from_views([view, *views[:number], *views[number + 1 :]], labels, index, "queries")
        for number, view in enumerate(views)
    )


def keep_negatives(pairs: Pairs, count: int, seed: int) -> Pairs:
    """Drop random negatives of every anchor until `count` are left; LMCL and CLLR vary this number (Fig. 4)."""
    anchors, candidates, first = len(pairs.anchors), len(pairs.candidates), pairs.first_negative
    device = pairs.anchors.device
    rank = torch.rand(anchors, candidates, generator=generator(seed, device), device=device)
    rank.scatter_(1, pairs.excluded, 2.0)  # behind all negatives
    rank[:, :first] = 2.0
    # Where there are candidates that are nobody's negatives, all positives are among them.
    excluded = first + pairs.dropped.shape[1] if first else pairs.excluded.shape[1]
    return pairs.without(rank.argsort(1)[:, count : candidates - excluded], distinct=True)
