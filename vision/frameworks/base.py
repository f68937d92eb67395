"""What a framework is: which networks see which views, which rows belong together, and who is paired with whom.

A framework knows nothing of the objective: it gives rows and relates them to `Pairs`, and every registered objective
that needs no more than those runs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.contrast.embedded import Embedded
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.seeding import Seeds
from dipole.core.ground.transfer import sent
from dipole.core.train.config import Settings
from dipole.vision.augment import AugmentConfig
from dipole.vision.encoders import Encoder, EncoderConfig, build_encoder, build_projector
from dipole.vision.heads import Norm
from dipole.vision.image_set import ImageSet
from dipole.vision.registry import Entries

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig

MOST_VIEWS = 16  # of an image, without small crops
Build = Callable[[int], tuple[Encoder, nn.Module, int]]  # channels -> encoder, projector, width of the embedding
Related = Pairs | tuple[Pairs, ...]


class Batch(NamedTuple):
    """views: each (B, C, H, W) in [0, 1]; labels (B,) or None; rows (B,) of the images; seed: of this step's draws."""

    views: list[Tensor]
    labels: Tensor | None
    rows: Tensor
    seed: int


class Order(Protocol):
    """Which images stand in an epoch, and where."""

    def __len__(self) -> int:
        """Rows of an epoch."""

    def rows(self, epoch: int) -> Tensor | np.ndarray:
        """(len(self),) indices of images."""


@dataclass(frozen=True)
class Shuffled:
    """Each of `count` images once in an epoch, in an order of the seed."""

    count: int
    seed: Seeds

    def __len__(self) -> int:
        return self.count

    def rows(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=self.seed.torch("data", "order", epoch))


@dataclass(frozen=True)
class Setup:
    """What a framework is built for.

    images: those of pretraining; size: side of the views in pixels; batch_size: images of a step over all ranks;
    make: what builds an encoder of a table.
    """

    images: ImageSet
    size: int
    batch_size: int
    encoder: EncoderConfig
    make: Callable[..., Encoder] = build_encoder

    def build(self, channels: int, share: float = 1.0) -> tuple[Encoder, nn.Module, int]:
        """Encoder of a share of its width and projector for so many channels, and the width of the embedding."""
        encoder = self.make(self.encoder, channels, self.size, share)
        if channels == self.images.channels and not encoder.own_statistics:
            encoder.set_statistics(*self.images.statistics)
        return encoder, *build_projector(self.encoder, encoder.taps[encoder.last])


class Branch(nn.Module):
    """An encoder and its projector; probes read the encoder at `tap`, and `watch` is told what the encoder gives."""

    watch: Callable[[Tensor], None] | None = None

    def __init__(self, encoder: Encoder, projector: nn.Module, tap: str | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.tap = encoder.check_tap(tap)

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder(images)
        if self.watch is not None:
            self.watch(features)
        return self.projector(features)

    def features(self, images: Tensor) -> Tensor:
        return self.encoder(images, self.tap)


class Method(nn.Module):
    """A framework: `forward(batch)` gives rows and their relation, `features` and `embedding` what is used later.

    Class attributes:
        table: its own settings, [vision.NAME]; None where it has none.
        single: why an image has one view here, as a clause; empty where it has two or more.
        negatives_mean: what vision.negatives is here, as a clause; empty where it has no effect.
        without_negatives: what to set instead, where it has none, as a clause.
        default_negatives: vision.negatives where the recipe gives none.
        positives_key: what of [vision] sets the number of positives; empty where nothing does.
        counts_anchor: whether it counts the anchor as well, as the number of views does.
        projector: linear layers and batch norm of the mlp projector where the recipe says nothing; None: 2 and none.

    Instance attributes:
        progress: share of the run's steps that were done before this one; the adapter keeps it, for schedules.
    """

    table: ClassVar[type[Settings] | None] = None
    single: ClassVar[str] = ""
    negatives_mean: ClassVar[str] = ""
    without_negatives: ClassVar[str] = ""
    default_negatives: ClassVar[int | None] = None
    positives_key: ClassVar[str] = "views"
    counts_anchor: ClassVar[bool] = True
    projector: ClassVar[tuple[int, Norm] | None] = None

    embedding_dim: int
    progress: float = 0.0

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        """The framework as a recipe sets it; ConfigError where its settings do not fit the images or the batch."""
        raise NotImplementedError

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        """ConfigError where it cannot train on such images."""

    @classmethod
    def augmentations(cls, config: VisionConfig) -> list[AugmentConfig]:
        """The augmentation of every view of an image, in order."""
        return [config.augment.of_view(number) for number in range(1, config.count + 1)]

    @classmethod
    def order(cls, config: VisionConfig, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        """Which images stand in an epoch; batches of `batch_size` are cut from it, and equal shares for the ranks."""
        return Shuffled(len(images), seed)

    @classmethod
    def block_positives(cls, config: VisionConfig) -> int:
        """Positives of a point in a block, b; 1 where it knows no blocks, for probes that draw some."""
        return 1

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        """Pairs as it makes them of a batch, and what it is called as it is set for them; for explanations.

        Args:
            views: of an image, without the small ones; members of a block.
            images: of the batch, B.
            rows: shape without the width -> embeddings.
            labels: (B,) class of each image, sorted.
        """
        raise NotImplementedError

    def forward(self, batch: Batch) -> Embedded:
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """What probes see: the encoder's tap."""
        raise NotImplementedError

    def embedding(self, images: Tensor) -> Tensor:
        """What the objective sees."""
        raise NotImplementedError

    def trained_encoder(self) -> Encoder:
        """The one encoder that is used after training; ConfigError where there are several."""
        raise NotImplementedError

    def branches(self) -> list[Branch]:
        """The branches that `embedding` goes through, whose encoders are used after training."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update what follows the optimizer."""

    def metrics(self) -> dict[str, Tensor | float]:
        """Numbers of the step to log, without gradient; their means stand in metrics.jsonl as train/NAME."""
        return {}


class OneBranch(Method):
    """What the frameworks of one network share: what is used after training is that network's."""

    def __init__(self, build: Build, channels: int, tap: str | None) -> None:
        super().__init__()
        encoder, projector, self.embedding_dim = build(channels)
        self.branch = Branch(encoder, projector, tap)

    def features(self, images: Tensor) -> Tensor:
        return self.branch.features(images)

    def embedding(self, images: Tensor) -> Tensor:
        return self.branch(images)

    def branches(self) -> list[Branch]:
        return [self.branch]

    def trained_encoder(self) -> Encoder:
        return self.branch.encoder


def instances(batch: Batch, like: Tensor) -> dict[str, Tensor]:
    """Class, where known, and index in the data set of each image, as rows of an `Embedded` beside `like`."""
    index = sent(batch.rows, like.device)
    return {"index": index} if batch.labels is None else {"index": index, "labels": batch.labels}


METHODS: Entries[type[Method]] = Entries("a framework")


def register_framework(name: str) -> Callable[[type[Method]], type[Method]]:
    """Make a subclass of `Method` the framework of that name, as vision.method spells it."""

    def decorate(method: type[Method]) -> type[Method]:
        METHODS.add(name, method)
        return method

    return decorate
