"""Frameworks: which networks see which views, and which rows are pairs.

A framework gives an objective rows and how to pair them. Every registered objective that needs no more than these pairs
runs in it. A framework built in Python holds its objective. In a run the trainer holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import to_device
from dipole.vision.augment import AugmentConfig
from dipole.vision.encoders import Encoder, EncoderConfig, build_encoder, build_projector
from dipole.vision.encoders.base import Norm
from dipole.vision.frameworks.branch import Branch
from dipole.vision.frameworks.loop import AnyObjective, Batch, Trainable
from dipole.vision.heads import Projection, projection_head
from dipole.vision.image_set import ImageSet, Order, image_order
from dipole.vision.registry import Entries
from dipole.vision.settings import PairKind, VisionSettings

__all__ = ["Batch", "Branch", "Framework", "Setup", "register_framework"]

AnyPairs = Pairs | tuple[Pairs, ...]
Rows = Callable[..., Tensor]
"""A function that returns random rows: rows() is (B, d), rows(k) is (B, k, d)."""


@dataclass(frozen=True)
class Setup:
    """The images, sizes and encoder that a framework is built for.

    Args:
        images: those of pretraining.
        size: side of the views in pixels.
        batch_size: images of a step over all ranks.
        encoder: its table.
    """

    images: ImageSet
    size: int
    batch_size: int
    encoder: EncoderConfig

    def branch(self, channels: int | None = None, share: float = 1.0) -> Branch:
        """Return an encoder with its projector.

        Args:
            channels: of the images. By default those of the data set.
            share: of the width of every layer of the encoder, > 0.
        """
        channels = channels or self.images.channels
        encoder = build_encoder(self.encoder, channels, self.size, share)
        if channels == self.images.channels and not encoder.own_statistics:
            encoder.set_statistics(*self.images.statistics)
        projector, width = build_projector(self.encoder, encoder.taps[encoder.last])
        return Branch(encoder, projector, self.encoder.tap, width)


class Framework(Trainable):
    """A framework: `loss = model(views)`, then `model.after_step()` after the optimizer's step.

    A subclass defines `embed`, which gives rows and how to pair them. With a queue or a momentum copy it defines
    `update`. All attributes are of the class.

    Args:
        objective: its text, an Objective or a Composite. None in a run, whose trainer has it.

    Attributes:
        table: its own settings, [vision.NAME], or None.
        single: why an image has one view here, as a clause. Empty if it has two or more.
        negatives_mean: the meaning of vision.negatives, as a clause. Empty if it has no effect.
        without_negatives: what to set instead, as a clause.
        default_negatives: vision.negatives if the recipe gives none.
        positives_key: the key of [vision] that sets the number of positives, or an empty text.
        counts_anchor: whether that key counts the anchor as well, as the number of views does.
        pairs: the values of vision.pairs that it can carry.
        reads_captions: whether it has an encoder for captions.
        projector: linear layers and batch norm of the mlp projector if the recipe gives none. None: 2, no norm.
        head_name: the projection head that a backbone gets in Python (`projection_head`).
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
    head_name: ClassVar[Projection] = "simclr"

    embedding_dim: int

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        """Return the framework of a recipe.

        Args:
            config: the table [vision].
            setup: what it is built for.

        Raises:
            ConfigError: settings do not fit the images or the batch.
        """
        raise NotImplementedError

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        """Check that it can train on images.

        Args:
            images: those of pretraining.

        Raises:
            ConfigError: it cannot.
        """

    @classmethod
    def augmentations(cls, config: VisionSettings) -> list[AugmentConfig]:
        """Return the augmentation of every view of an image, in order.

        Args:
            config: the table [vision].
        """
        return [config.augment.of_view(number) for number in range(1, config.count + 1)]

    @classmethod
    def order(cls, config: VisionSettings, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        """Return the order of images in an epoch. It is cut into batches, and these into equal shares for the ranks.

        Args:
            config: the table [vision].
            images: those of pretraining.
            batch_size: images of a step over all ranks.
            world_size: ranks.
            seed: of the run.
        """
        return image_order(images, seed)

    @classmethod
    def sample(cls, views: int, rows: Rows, labels: Tensor | None) -> AnyPairs:
        """Return example pairs of a batch of B images, to find the frameworks that can carry an objective.

        Args:
            views: of an image, without the small ones, or members of a block.
            rows: function of further dimensions (k) that returns random embeddings (B, k, d).
            labels: (B,) class of each image, sorted.
        """
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """Return the features that probes see, (n, width).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        raise NotImplementedError

    def embedding(self, images: Tensor) -> Tensor:
        """Return what the objective sees, (n, embedding_dim).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        raise NotImplementedError

    def branches(self) -> list[Branch]:
        """Return the branches of `embedding`, whose encoders are used after training."""
        raise NotImplementedError

    def trained_encoder(self) -> Encoder:
        """Return the encoder for use after training.

        Raises:
            ConfigError: there are several, or it is no `Encoder`.
        """
        if len(self.branches()) > 1:
            raise ConfigError("a run of a method with two encoders, such as cmc, cannot be exported as one model.")
        encoder = self.branches()[0].encoder
        if not isinstance(encoder, Encoder):
            raise ConfigError("only an Encoder can be exported: wrap the backbone by `as_encoder`.")
        return encoder


class OneBranch(Framework):
    """A framework with one network, which is used after training.

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), or a `Branch`.
        objective: as in `Framework`.
        head: the projection head of a backbone. None is the paper's (`projection_head`), `nn.Identity()` is none.

    Raises:
        ConfigError: the width of the features is needed and cannot be measured.
    """

    def __init__(
        self, backbone: nn.Module, objective: AnyObjective | None = None, head: nn.Module | None = None
    ) -> None:
        super().__init__(objective)
        self.branch = make_branch(backbone, head, self.head_name)
        self._build_objective()

    @property
    def embedding_dim(self) -> int:  # type: ignore[override]
        """Width of the embedding.

        Raises:
            ConfigError: it is unknown.
        """
        return self.branch.dim

    @property
    def backbone(self) -> nn.Module:
        """The backbone without its head."""
        return self.branch.encoder

    def features(self, images: Tensor) -> Tensor:
        return self.branch.features(images)

    def embedding(self, images: Tensor) -> Tensor:
        return self.branch(images)

    def branches(self) -> list[Branch]:
        return [self.branch]


def make_branch(backbone: nn.Module, head: nn.Module | None, name: Projection) -> Branch:
    """Return a backbone with its head, by default the one that a paper names. A `Branch` is returned unchanged."""
    if isinstance(backbone, Branch):
        return backbone
    branch = Branch(backbone, head)
    if head is None:
        branch.projector = projection_head(name, branch.width)
    return branch


def in_passes(branch: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """Return the embeddings (B, d) of each view, with one pass for consecutive views of one shape."""
    found: list[Tensor] = []
    for _, group in groupby(views, key=lambda view: view.shape):
        several = list(group)
        found += branch(torch.cat(several)).chunk(len(several))
    return found


def embedded(
    rows: Mapping[str, Tensor | Sequence[Tensor]], batch: Batch, pair: Callable[[dict[str, Any], int], AnyPairs]
) -> EncodedBatch:
    """Return rows of a batch, with labels and indices, for a function that pairs the rows of all ranks.

    rows: (B, d) by name, or sequences of them, such as one for each view. pair: (the same of all ranks with "index"
        and, if known, "labels"; seed of the step) -> pairs.
    """
    seed = batch.seed  # without the views, which the closure would keep alive
    lists = {name: len(each) for name, each in rows.items() if not isinstance(each, Tensor)}
    flat: dict[str, Tensor] = {}
    for name, each in rows.items():
        flat |= {name: each} if isinstance(each, Tensor) else {f"{name}{n}": one for n, one in enumerate(each)}

    def relate(found: dict[str, Tensor]) -> AnyPairs:
        grouped = {name: [found[f"{name}{n}"] for n in range(count)] for name, count in lists.items()}
        return pair({**found, **grouped}, seed)

    return EncodedBatch({**flat, **instances(batch, next(iter(flat.values())))}, relate)


def instances(batch: Batch, like: Tensor) -> dict[str, Tensor]:
    """Return the index of each image in the data set, and its label if known, on the device of `like`."""
    found = {}
    if batch.rows is not None:
        found["index"] = to_device(batch.rows, like.device)
    if batch.labels is not None:
        found["labels"] = batch.labels
    return found


FRAMEWORKS: Entries[type[Framework]] = Entries("a framework")


def register_framework(name: str) -> Callable[[type[Framework]], type[Framework]]:
    """Register a subclass of `Framework` under a name for vision.method.

    Args:
        name: an unused name.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        RegistryError: from the decorator, if the name is taken.
    """

    def decorate(framework: type[Framework]) -> type[Framework]:
        FRAMEWORKS.add(name, framework)
        return framework

    return decorate
