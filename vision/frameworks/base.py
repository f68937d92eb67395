"""Frameworks: which networks see which views, and which rows are pairs.

A framework gives an objective rows and how to pair them. Every registered objective that needs no more than these pairs
runs in it. A framework built in Python holds its objective. In a run the trainer holds it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.compute_loss import as_composite
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.plugins import Entries
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import to_device
from dipole.core.utils.uncompiled import uncompiled
from dipole.vision.augment import AugmentConfig
from dipole.vision.encoders import Encoder
from dipole.vision.encoders.base import Norm
from dipole.vision.frameworks.branch import Branch, PassedFeatures, Setup, make_branch, shown
from dipole.vision.frameworks.queue import Fresh
from dipole.vision.heads import Projection
from dipole.vision.image_set import ImageSet, Order
from dipole.vision.pairs import kind_of
from dipole.vision.settings import PairsName, VisionSettings

__all__ = ["Batch", "Branch", "Framework", "Setup", "register_framework"]

AnyObjective = str | Objective | Composite
AnyPairs = Pairs | tuple[Pairs, ...]
Draw = Callable[..., Tensor]
"""A function that returns random rows: rows() is (B, d), rows(k) is (B, k, d)."""


class Batch(NamedTuple):
    """Images of a step, as views.

    Attributes:
        views: (B, C, H, W) in [0, 1] each.
        labels: (B,) class of each image. None without labels.
        rows: (B,) index of each image in the data set. None if it is unknown.
        seed: of this step's random draws.
        captions: arguments of the text encoder. None without captions.
    """

    views: Sequence[Tensor]
    labels: Tensor | None
    rows: Tensor | None
    seed: int
    captions: Any = None


class Framework(nn.Module):
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
        fewest_views: smallest number of views of an image, unless it is `single`.
        progress: share of the run's steps before this one, for schedules. A run's adapter updates it.
        steps: steps of the whole run, for schedules. None if unknown.
    """

    table: ClassVar[type[Settings] | None] = None
    single: ClassVar[str] = ""
    negatives_mean: ClassVar[str] = ""
    without_negatives: ClassVar[str] = ""
    default_negatives: ClassVar[int | None] = None
    positives_key: ClassVar[str] = "views"
    counts_anchor: ClassVar[bool] = True
    pairs: ClassVar[tuple[PairsName, ...]] = ("augmented", "columns")
    reads_captions: ClassVar[bool] = False
    projector: ClassVar[tuple[int, Norm] | None] = None
    head_name: ClassVar[Projection] = "simclr"

    fewest_views: int = 2
    progress: float = 0.0
    steps: int | None = None

    def __init__(self, objective: AnyObjective | None = None) -> None:
        super().__init__()
        self.objective = None if objective is None else as_composite(objective)
        if self.objective is not None:
            self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self._step: int | None = 0  # the value of `step`, known without reading the device; None: read it
        self._terms: dict[str, Tensor | float] = {}
        self._features: PassedFeatures | None = None
        self._fresh = Fresh()

    # A step: rows of a batch, and what follows the optimizer ----------------------------------------------------------

    def embed(self, batch: Batch) -> EncodedBatch:
        """Return the rows of a batch of this rank, and how to pair the rows of all ranks.

        Args:
            batch: views of the images.
        """
        raise NotImplementedError

    def embed_with_features(self, batch: Batch) -> EncodedBatch:
        """Return what `embed` does, after `pass_features` with the encoder's features.

        Args:
            batch: views of the images.
        """
        if self._features is None:
            return self.embed(batch)
        return self._features.embed(lambda: self.embed(batch), len(batch.views[0]))

    def pass_features(self) -> int:
        """Let the objective see the encoders' features as well from now on, and return their width."""
        branches = self.branches()
        if all(isinstance(branch.projector, nn.Identity) for branch in branches):
            return self.embedding_dim
        if self._features is None:
            self._features = PassedFeatures(branches)
        return self._features.width

    def update(self) -> None:
        """Update queues, banks and momentum copies after the optimizer's step."""

    def metrics(self) -> dict[str, Tensor | float]:
        """Return numbers of the step to log, () each, without gradient. A run logs their means as train/NAME.

        They are the terms of the objective by name, and those of the framework.
        """
        return dict(self._terms)

    # Built from a recipe ----------------------------------------------------------------------------------------------

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
        return kind_of(config).order(config, images, batch_size, world_size, seed)

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> AnyPairs:
        """Return example pairs of a batch of B images, to find the frameworks that can carry an objective.

        Args:
            views: of an image, without the small ones, or members of a block.
            rows: function of further dimensions (k) that returns random embeddings (B, k, d).
            labels: (B,) class of each image, sorted.
        """
        raise NotImplementedError

    # Used after training ----------------------------------------------------------------------------------------------

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

    @cached_property
    def embedding_dim(self) -> int:
        """Width of the embedding.

        Raises:
            ConfigError: it is unknown.
        """
        return self.branches()[0].dim

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

    # In a loop of your own --------------------------------------------------------------------------------------------

    def forward(self, views: Sequence[Tensor], labels: Tensor | None = None, index: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, (), with gradient. With several ranks, each gives its own images.

        Args:
            views: one batch of images (B, C, H, W) for each view, row b of each a view of image b.
            labels: (B,) class of each image, for objectives that use labels.
            index: (B,) index of each image in the data set. Objectives leave copies of an image out of the negatives.

        Raises:
            ConfigError: there is no objective.
            PairsError: views do not fit together, or the objective cannot use the pairs.
        """
        return self._loss_of(views, labels, index)

    def _loss_of(
        self, views: Sequence[Tensor], labels: Tensor | None, index: Tensor | None, captions: Any = None
    ) -> Tensor:
        """Return the loss of a batch, (), as `forward`. captions: as in `Batch`."""
        if self.objective is None:
            raise ConfigError(
                f"{type(self).__name__} has no objective: build it with one, such as "
                f"{type(self).__name__}(backbone, objective='infonce(temperature=0.5)')."
            )
        checked = self._checked(views)
        first = checked[0]
        labels, index = _moved("labels", labels, first), _moved("index", index, first)
        batch = Batch(checked, labels, index, self._done(), captions)
        if self._reads_features():
            self.pass_features()
        embedded = self.embed_with_features(batch)
        # Similarities are computed in full precision.
        with torch.autocast(first.device.type, enabled=False):
            outcome = self.objective(embedded)
        self._terms = {name: term.value for name, term in outcome.terms.items()}
        loss: Tensor = outcome.loss
        return loss

    def _checked(self, views: Sequence[Tensor]) -> list[Tensor]:
        found = list(views) if isinstance(views, Iterable) and not isinstance(views, Tensor) else [views]
        name = type(self).__name__
        for number, view in enumerate(found):
            if not isinstance(view, Tensor) or view.ndim < 2 or not view.is_floating_point():
                raise PairsError(
                    f"{name}: views[{number}] must be a batch of images, floating point (B, C, H, W), got "
                    f"{shown(view)}. dipole.vision.Augment makes such views."
                )
            if len(view) != len(found[0]):
                raise PairsError(
                    f"{name}: views[{number}] has {counted(len(view), 'image')}, views[0] has {len(found[0])}. Row b "
                    "of each is a view of image b."
                )
        fewest = 1 if self.single else self.fewest_views
        if len(found) < fewest or (self.reads_captions and len(found) > 1):
            wanted = "1 view" if self.reads_captions else f"{fewest} or more views"
            given = str(len(found))
            if isinstance(views, Tensor):
                given = f"one tensor {tuple(views.shape)}. Call model([first, second])"
            raise PairsError(f"{name} takes a list of {wanted} of the images, (B, C, H, W) each, got {given}.")
        return found

    @uncompiled  # else torch.compile would compile each step again
    def _done(self) -> int:
        """Return the number of finished steps."""
        if self._step is None:
            self._step = int(self.get_buffer("step"))
        return self._step

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._step = None if self.objective is not None else 0

    def after_step(self, learning_rate: float | None = None) -> None:
        """Update queues, banks, momentum copies and the objective. Call it after the optimizer's step.

        Args:
            learning_rate: of this step, >= 0, for objectives with a proximal step, such as cllr(solver=proximal).

        Raises:
            ConfigError: the objective needs the learning rate.
        """
        if self.objective is None:
            self.update()
            return
        for _, _, term in self.objective:
            has_step = type(term).after_step is not Objective.after_step
            if has_step and term.needs_learning_rate is not False and learning_rate is None:
                raise ConfigError(
                    f"{self.objective} makes a proximal step, which needs the learning rate: "
                    "model.after_step(optimizer.param_groups[0]['lr'])."
                )
        done = self._done()
        if self.steps is not None:
            self.progress = min(1.0, done / self.steps)
        self.update()
        self._step = done + 1
        self.get_buffer("step").add_(1)
        self.objective.after_step(learning_rate or 0.0, self._step, self.steps)

    def _build_objective(self) -> None:
        """Create the parameters of the objective on the device of the networks, when these exist."""
        if self.objective is None:
            return
        self.objective.to(next((each.device for each in self.branches()[0].parameters()), None))
        if not any(nn.parameter.is_lazy(each) for each in self.objective.parameters()):
            return
        width = self.branches()[0].width if self._reads_features() else None
        self.objective.build(self.embedding_dim, width)

    def _reads_features(self) -> bool:
        return self.objective is not None and any(term.on_features for _, _, term in self.objective)


class OneBranch(Framework):
    """A framework with one network: a backbone with its head, or a `Branch`. `queue` takes the fresh rows, if any."""

    def __init__(
        self, backbone: nn.Module, objective: AnyObjective | None = None, head: nn.Module | None = None
    ) -> None:
        super().__init__(objective)
        self.branch = make_branch(backbone, head, self.head_name)
        self.queue: Any = None
        self._build_objective()

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

    def update(self) -> None:
        for rows in self._fresh.take():
            self.queue.push(torch.cat(rows))


def embedded(
    rows: Mapping[str, Tensor | Sequence[Tensor]], batch: Batch, pair: Callable[[dict[str, Any], int], AnyPairs]
) -> EncodedBatch:
    """Return rows of a batch, (B, d) or a list of such by name, for `pair`.

    pair: (rows of all ranks, with "index" and "labels" if known, seed) -> pairs.
    """
    seed = batch.seed  # without the views, which the closure would keep alive
    lists = {name: len(each) for name, each in rows.items() if not isinstance(each, Tensor)}
    flat: dict[str, Tensor] = {}
    for name, each in rows.items():
        flat |= {name: each} if isinstance(each, Tensor) else {f"{name}{n}": one for n, one in enumerate(each)}
    if batch.rows is not None:
        flat["index"] = to_device(batch.rows, next(iter(flat.values())).device)
    if batch.labels is not None:
        flat["labels"] = batch.labels

    def relate(found: dict[str, Tensor]) -> AnyPairs:
        grouped = {name: [found[f"{name}{n}"] for n in range(count)] for name, count in lists.items()}
        return pair({**found, **grouped}, seed)

    return EncodedBatch(dict(flat), relate)


def _moved(name: str, values: Tensor | None, like: Tensor) -> Tensor | None:
    """Return whole numbers, one for each image, on the device of the images."""
    if values is None:
        return None
    try:
        found = torch.as_tensor(values)
        got = shown(found)
    except (TypeError, ValueError, RuntimeError):
        found, got = torch.zeros(()), f"{values!r:.80}"
    if found.shape != (len(like),) or found.is_floating_point():
        raise PairsError(f"{name} must be {len(like)} whole numbers, one for each image, got {got}.")
    return found.to(like.device)


FRAMEWORKS: Entries[type[Framework]] = Entries("a framework")


def register_framework(name: str) -> Callable[[type[Framework]], type[Framework]]:
    """Return a decorator that registers a subclass of `Framework` under a name for vision.method.

    Args:
        name: an unused name.

    Raises:
        RegistryError: from the decorator, if the name is taken.
    """

    return FRAMEWORKS.register(name)
