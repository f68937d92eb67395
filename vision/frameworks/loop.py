"""A framework in a loop of your own: its objective, the loss of a batch of views, and what follows the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.train.compute_loss import as_composite
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.text import counted
from dipole.vision.frameworks.branch import Branch, PassedFeatures

AnyObjective = str | Objective | Composite


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


class Trainable(nn.Module):
    """A module that computes a loss of views: `loss = model(views)`, then `model.after_step()`.

    Args:
        objective: its text, an Objective or a Composite. None in a run, whose trainer has it.

    Attributes:
        embedding_dim: width of the embedding.
        progress: share of the run's steps before this one, for schedules. A run's adapter updates it.
        steps: steps of the whole run, for schedules. None if unknown.
    """

    embedding_dim: int
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

    def _build_objective(self) -> None:
        """Create the parameters of the objective, when the networks exist."""
        if self.objective is None or not any(nn.parameter.is_lazy(each) for each in self.objective.parameters()):
            return
        width = None
        if self._reads_features():
            width = self.branches()[0].width
        self.objective.build(self.embedding_dim, width)

    def _reads_features(self) -> bool:
        return self.objective is not None and any(term.on_features for _, _, term in self.objective)

    def pass_features(self) -> int:
        """Pass the encoders' features to the objective as well, from now on.

        Returns:
            Their width.
        """
        branches = self.branches()
        if all(isinstance(branch.projector, nn.Identity) for branch in branches):
            return self.embedding_dim
        if self._features is None:
            self._features = PassedFeatures(branches)
        return self._features.width

    def branches(self) -> list[Branch]:
        """Return the branches of `embedding`, whose encoders are used after training."""
        raise NotImplementedError

    def embed(self, batch: Batch) -> EncodedBatch:
        """Embed a batch of this rank.

        Args:
            batch: views of the images.

        Returns:
            Rows of this rank, and how to pair the rows of all ranks.
        """
        raise NotImplementedError

    def embed_with_features(self, batch: Batch) -> EncodedBatch:
        """Embed a batch, after `pass_features` with the encoder's features.

        Args:
            batch: views of the images.

        Returns:
            As `embed`.
        """
        if self._features is None:
            return self.embed(batch)
        with self._features.recorded():
            embedded = self.embed(batch)
        return self._features.added(embedded, len(batch.views[0]))

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
        batch = Batch(checked, _moved(labels, checked[0]), _moved(index, checked[0]), self._done(), captions)
        if self._reads_features():
            self.pass_features()
        embedded = self.embed_with_features(batch)
        # Similarities are computed in full precision.
        with torch.autocast(checked[0].device.type, enabled=False):
            outcome = self.objective(embedded)
        self._terms = dict(outcome.terms)
        loss: Tensor = outcome.loss
        return loss

    def _view_counts(self) -> tuple[int, int | None]:
        """Return the smallest and the largest number of views of an image. None: any."""
        return (1, 1) if self.single else (2, None)

    def _checked(self, views: Sequence[Tensor]) -> list[Tensor]:
        found = [views] if isinstance(views, Tensor) else list(views)
        name = type(self).__name__
        for number, view in enumerate(found):
            if not isinstance(view, Tensor) or view.ndim < 2 or not view.is_floating_point():
                shown = (
                    f"{view.dtype} of shape {tuple(view.shape)}" if isinstance(view, Tensor) else type(view).__name__
                )
                raise PairsError(
                    f"{name}: views[{number}] must be a batch of images, floating point (B, C, H, W), got {shown}. "
                    "dipole.vision.Augment makes such views."
                )
            if len(view) != len(found[0]):
                raise PairsError(
                    f"{name}: views[{number}] has {counted(len(view), 'image')}, views[0] has {len(found[0])}. Row b "
                    "of each is a view of image b."
                )
        fewest, most = self._view_counts()
        if len(found) < fewest or (most is not None and len(found) > most):
            wanted = f"{fewest} or more views" if most is None else counted(most, "view")
            raise PairsError(f"{name} takes a list of {wanted} of the images, (B, C, H, W) each, got {len(found)}.")
        return found

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
        if learning_rate is None and any(_needs_rate(term) for _, _, term in self.objective):
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

    def update(self) -> None:
        """Update queues, banks and momentum copies after the optimizer's step."""

    def metrics(self) -> dict[str, Tensor | float]:
        """Return numbers of the step to log, () each, without gradient. A run logs their means as train/NAME.

        They are the terms of the objective by name, and those of the framework.
        """
        return dict(self._terms)


def _moved(values: Tensor | None, like: Tensor) -> Tensor | None:
    return None if values is None else torch.as_tensor(values).to(like.device)


def _needs_rate(term: Objective) -> bool:
    if term.needs_learning_rate is not None:
        return term.needs_learning_rate
    return type(term).after_step is not Objective.after_step
