"""What a framework is: which networks see which views, which rows belong together, and who is paired with whom.

A framework knows nothing of the objective: it gives rows and relates them to `Pairs`, and every registered objective
that needs no more than those runs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import to_device
from dipole.vision.augment import AugmentConfig
from dipole.vision.decoding import Encoded
from dipole.vision.encoders import Encoder, EncoderConfig, build_encoder, build_projector
from dipole.vision.heads import Norm
from dipole.vision.image_set import ImageSet
from dipole.vision.registry import Entries

__all__ = [
    "Batch",
    "Branch",
    "Method",
    "Setup",
    "register_framework",
]

if TYPE_CHECKING:
    from dipole.vision.captions import Tokens
    from dipole.vision.config import VisionConfig

PairKind = Literal["augmented", "labels", "columns"]
MOST_VIEWS = 16  # of an image, without small crops
Build = Callable[[int], tuple[Encoder, nn.Module, int]]  # channels -> encoder, projector, width of the embedding
Related = Pairs | tuple[Pairs, ...]


class Batch(NamedTuple):
    """Images of a step, as views.

    Attributes:
        views: (B, C, H, W) in [0, 1] each.
        labels: (B,) class of each image; None where nothing is labelled.
        rows: (B,) of the images in the data set.
        seed: of this step's draws.
        captions: of the images, where there are some; else None.
    """

    views: list[Tensor]
    labels: Tensor | None
    rows: Tensor
    seed: int
    captions: Tokens | None = None


class Order(Protocol):
    """Which images stand in an epoch, and where."""

    def __len__(self) -> int:
        """Rows of an epoch."""

    def rows(self, epoch: int) -> Tensor | np.ndarray:
        """Indices of images in the order of an epoch, (n,) of as many as `len` says.

        Args:
            epoch: its number, from 0.
        """


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
class ShardByShard:
    """Each image of a stream once in an epoch, nearly in the order in which the stream is read.

    Its shards follow one another in an order of the seed, and the images are drawn anew within reaches of `buffer`
    that begin elsewhere in every epoch. It is known before anything is read: any place in it can be gone on from.

    shard: (n,) of each image.
    """

    shard: Tensor
    buffer: int
    seed: Seeds

    def __len__(self) -> int:
        return len(self.shard)

    def rows(self, epoch: int) -> Tensor:
        generator = self.seed.torch("data", "order", epoch)
        turn = torch.randperm(int(self.shard.max()) + 1, generator=generator)
        order = turn[self.shard].argsort(stable=True)
        reach = (torch.arange(len(order)) + torch.randint(self.buffer, (), generator=generator)) // self.buffer
        chance = torch.rand(len(order), generator=generator, dtype=torch.float64)
        return order[(reach + chance).argsort()]


def image_order(images: ImageSet, seed: Seeds) -> Order:
    """Each image once in an epoch, in an order of the seed; of a stream one in which it can be read."""
    stream = images.images.stream if isinstance(images.images, Encoded) else None
    if stream is None:
        return Shuffled(len(images), seed)
    assert isinstance(images.images, Encoded)
    shard = torch.searchsorted(stream.bounds, images.images.rows, right=True) - 1
    return ShardByShard(shard, stream.buffer, seed)


@dataclass(frozen=True)
class Setup:
    """What a framework is built for.

    Args:
        images: those of pretraining.
        size: side of the views in pixels.
        batch_size: images of a step over all ranks.
        encoder: its table.
        make: what builds an encoder of a table.
    """

    images: ImageSet
    size: int
    batch_size: int
    encoder: EncoderConfig
    make: Callable[..., Encoder] = build_encoder

    def build(self, channels: int, share: float = 1.0) -> tuple[Encoder, nn.Module, int]:
        """Encoder, projector, and the width of the embedding.

        Args:
            channels: of the images.
            share: of the width of every layer of the encoder, > 0.
        """
        encoder = self.make(self.encoder, channels, self.size, share)
        if channels == self.images.channels and not encoder.own_statistics:
            encoder.set_statistics(*self.images.statistics)
        return encoder, *build_projector(self.encoder, encoder.taps[encoder.last])


class Branch(nn.Module):
    """An encoder and its projector; `watch` is told what the encoder gives.

    Args:
        encoder: of images.
        projector: of what it gives, a Module.
        tap: the layer that probes read; None: the last.

    Raises:
        ConfigError: there is no such layer.
    """

    watch: Callable[[Tensor], None] | None = None

    def __init__(self, encoder: Encoder, projector: nn.Module, tap: str | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.tap = encoder.check_tap(tap)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (n, d), behind the projector.

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        features = self.encoder(images)
        if self.watch is not None:
            self.watch(features)
        return self.projector(features)

    def features(self, images: Tensor) -> Tensor:
        """What probes see, (n, width of the tap).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        return self.encoder(images, self.tap)


class Method(nn.Module):
    """A framework: `forward(batch)` gives rows and their relation, `features` and `embedding` what is used later.

    All attributes but `progress` are of the class.

    Attributes:
        table: its own settings, [vision.NAME]; None where it has none.
        single: why an image has one view here, as a clause; empty where it has two or more.
        negatives_mean: what vision.negatives is here, as a clause; empty where it has no effect.
        without_negatives: what to set instead, where it has none, as a clause.
        default_negatives: vision.negatives where the recipe gives none.
        positives_key: what of [vision] sets the number of positives; empty where nothing does.
        counts_anchor: whether it counts the anchor as well, as the number of views does.
        pairs: what of vision.pairs it can carry.
        reads_captions: whether it has an encoder for captions.
        projector: linear layers and batch norm of the mlp projector where the recipe says nothing; None: 2 and none.
        progress: share of the run's steps that were done before this one; the adapter keeps it, for schedules.
    """

    table: ClassVar[type[Settings] | None] = None
    single: ClassVar[str] = ""
    negatives_mean: ClassVar[str] = ""
    without_negatives: ClassVar[str] = ""
    default_negatives: ClassVar[int | None] = None
    positives_key: ClassVar[str] = "views"
    counts_anchor: ClassVar[bool] = True
    pairs: ClassVar[tuple[PairKind, ...]] = ("augmented", "columns")
    reads_captions: ClassVar[bool] = False
    projector: ClassVar[tuple[int, Norm] | None] = None

    embedding_dim: int
    progress: float = 0.0

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        """The framework as a recipe sets it.

        Args:
            config: the table [vision].
            setup: what it is built for.

        Raises:
            ConfigError: settings do not fit the images or the batch.
        """
        raise NotImplementedError

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        """Look whether it can train on such images.

        Args:
            images: those of pretraining.

        Raises:
            ConfigError: it cannot.
        """

    @classmethod
    def augmentations(cls, config: VisionConfig) -> list[AugmentConfig]:
        """The augmentation of every view of an image, in order.

        Args:
            config: the table [vision].
        """
        return [config.augment.of_view(number) for number in range(1, config.count + 1)]

    @classmethod
    def order(cls, config: VisionConfig, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        """Which images stand in an epoch; batches are cut from it, and equal shares for the ranks.

        Args:
            config: the table [vision].
            images: those of pretraining.
            batch_size: images of a step over all ranks.
            world_size: ranks.
            seed: of the run.
        """
        return image_order(images, seed)

    @classmethod
    def block_positives(cls, config: VisionConfig) -> int:
        """Positives of a point in a block, b; 1 where it knows no blocks, for probes that draw some.

        Args:
            config: the table [vision].
        """
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
        """Rows of this rank and how they are paired.

        Args:
            batch: views of the images.
        """
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """What probes see, the encoder's tap, (n, width).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        raise NotImplementedError

    def embedding(self, images: Tensor) -> Tensor:
        """What the objective sees, (n, embedding_dim).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        raise NotImplementedError

    def trained_encoder(self) -> Encoder:
        """The one encoder that is used after training.

        Raises:
            ConfigError: there are several.
        """
        raise NotImplementedError

    def branches(self) -> list[Branch]:
        """The branches that `embedding` goes through, whose encoders are used after training."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update what follows the optimizer."""

    def metrics(self) -> dict[str, Tensor | float]:
        """Numbers of the step to log, () each, without gradient; their means stand in metrics.jsonl as train/NAME."""
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
    index = to_device(batch.rows, like.device)
    return {"index": index} if batch.labels is None else {"index": index, "labels": batch.labels}


METHODS: Entries[type[Method]] = Entries("a framework")


def register_framework(name: str) -> Callable[[type[Method]], type[Method]]:
    """Make a subclass of `Method` the framework of a name, as vision.method spells it.

    Args:
        name: that no framework has yet.

    Returns:
        A decorator that gives back what it decorates.

    Raises:
        RegistryError: from the decorator, if the name is taken.
    """

    def decorate(method: type[Method]) -> type[Method]:
        METHODS.add(name, method)
        return method

    return decorate
