"""SimCLR: all views of a batch through one network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.train.sampling import ClassBlocks
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import generator
from dipole.vision.frameworks.base import (
    Batch,
    Build,
    OneBranch,
    Order,
    Related,
    Setup,
    Shuffled,
    instances,
    register_framework,
)
from dipole.vision.image_set import ImageSet

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
    by_label: all views of an anchor's class are its positives (supervised contrast, Khosla et al. 2020).
    """

    table = SimCLRConfig
    negatives_mean = "so many of the batch's per anchor"
    pairs = ("augmented", "labels", "columns")

    def __init__(
        self,
        build: Build,
        channels: int,
        tap: str | None,
        negatives: int | None = None,
        repel: Repel = "all",
        by_label: bool = False,
    ) -> None:
        super().__init__(build, channels, tap)
        self.by_label = by_label
        self.negatives = negatives
        self.repel: Repel = repel

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        repel: Repel = config.own_table.negatives
        most = (config.count if repel == "all" else 1) * (setup.batch_size - 1)
        if config.negatives is not None and config.negatives > most:
            raise ConfigError(
                f"vision.negatives: a batch of {setup.batch_size} with {config.count} views has "
                f"{counted(most, 'negative')} per "
                f"anchor with vision.simclr.negatives = {repel!r}, fewer than {config.negatives}; raise "
                "train.batch_size, or take method = 'moco' with a queue."
            )
        by_label = config.pairs == "labels"
        if by_label and repel != "all":
            raise ConfigError(
                f"vision.simclr.negatives = {repel!r} has no effect with vision.pairs = 'labels': all views of other "
                "classes repel; leave it out."
            )
        return cls(setup.build, setup.images.channels, config.encoder.tap, config.negatives, repel, by_label)

    @classmethod
    def order(cls, config: VisionConfig, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        if config.pairs != "labels":
            return super().order(config, images, batch_size, world_size, seed)
        return class_order(config.images_per_class, images, batch_size, world_size, seed)

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
        by_label = self.by_label

        def relate(rows: dict[str, Tensor]) -> Related:
            views = [rows[f"view{number}"] for number in range(count)]
            if by_label:
                return Pairs.from_labels(views, rows["labels"], rows["index"])
            found = view_pairs(views, rows.get("labels"), rows["index"], repel)
            if negatives is not None:
                found = tuple(keep_negatives(pairs, negatives, seed + n) for n, pairs in enumerate(found))
            return found[0] if len(found) == 1 else found

        views = {f"view{number}": view for number, view in enumerate(z.chunk(count))}
        return Embedded({**views, **instances(batch, z)}, relate)


def class_order(per_class: int | None, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
    """Which images stand in an epoch of supervised contrast: all of them, or so many of a class beside each other.

    Raises:
        ConfigError: no image has a label, or a batch is no whole number of classes' images.
    """
    labels = images.labels
    if labels is None or bool((labels < 0).all()):
        raise ConfigError(
            f"vision.pairs: 'labels' makes all of a class positives, and {images.name} has no labels; take a labelled "
            "split, or pairs = 'augmented'."
        )
    if per_class is None:
        return Shuffled(len(images), seed)
    if bool((labels < 0).any()):
        raise ConfigError(
            f"vision.images_per_class: {images.name} has images without a label; take a labelled split, or "
            "leave it out."
        )
    if batch_size // world_size % per_class:
        raise ConfigError(
            f"train.batch_size: {batch_size} is no whole number of vision.images_per_class = {per_class} for each of "
            f"{world_size} processes; give a multiple of {per_class * world_size}."
        )
    return ClassBlocks(labels.numpy(), per_class, None, seed)


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
