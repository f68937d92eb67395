"""The base of SimSiam, BYOL, MoCo v3 and NNCLR: a predictor after the projector, and a stopped gradient."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.checks import check_choice
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.spec import check_whole
from dipole.core.train.config import Settings
from dipole.core.utils.distributed import all_sum
from dipole.core.utils.errors import PairsError
from dipole.vision.encoders.base import Norm, mlp
from dipole.vision.frameworks.base import AnyObjective, AnyPairs, Batch, Draw, OneBranch, embedded, register_framework
from dipole.vision.frameworks.branch import Setup, check_module, placed_like
from dipole.vision.frameworks.moco import every_view_in_turn
from dipole.vision.frameworks.queue import Queue, check_momentum, cosine_schedule, momentum_copy, momentum_update
from dipole.vision.heads import Prediction, prediction_head
from dipole.vision.settings import VisionSettings


class PredictorConfig(Settings):
    """The common settings of frameworks with a predictor."""

    predictor_hidden: int | None = Field(
        None, ge=1, description="hidden units (default encoder.hidden or encoder.dim; simsiam: encoder.dim / 4)"
    )
    predictor_norm: Norm = Field("hidden", description="batch norm in the predictor: after no layer, the hidden, all")


class Predicting(OneBranch):
    """Compares every view in turn with the image's other views, one pass each. One of the sides gets no gradient."""

    table = PredictorConfig
    without_negatives = "the other images of the batch are negatives if the objective has some"
    head_name: ClassVar[Prediction] = "byol"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "0.5*regression",
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
    ) -> None:
        super().__init__(backbone, objective, head)
        check_module("predictor", predictor)
        if predictor is None:
            predictor = placed_like(prediction_head(self.head_name, self.embedding_dim), self.backbone)
        self.predictor = predictor
        self._projected: Tensor | None = None

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        table: PredictorConfig = config.own_table
        hidden = table.predictor_hidden or cls._default_hidden(config)
        branch = setup.branch()
        predictor = mlp([branch.dim, hidden, branch.dim], table.predictor_norm)
        # Further settings of a framework are arguments of the same name.
        others: dict[str, Any] = {name: value for name, value in table if not name.startswith("predictor_")}
        return cls(branch, None, predictor=predictor, **others)

    @classmethod
    def _default_hidden(cls, config: VisionSettings) -> int:
        """Return the default hidden units of the predictor."""
        return config.encoder.hidden or config.encoder.dim

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> AnyPairs:
        return every_view_in_turn(rows(views).unbind(1), rows(views).unbind(1), labels=labels)

    def _sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return anchors and keys (B, d) of every view, from the projections (B, d) of every view."""
        raise NotImplementedError

    def embed(self, batch: Batch) -> EncodedBatch:
        norms = [each for each in self.predictor.modules() if isinstance(each, nn.BatchNorm1d)]
        if self.training and norms and len(batch.views[0]) == 1:
            raise PairsError("the heads' batch norm cannot train on one image: give DataLoader(..., drop_last=True).")
        projected = [self.branch(view) for view in batch.views]
        self._projected = projected[0].detach().clone()  # of a graph that may be replayed
        anchors, keys = self._sides(batch, projected)
        return embedded({"anchor": anchors, "key": keys}, batch, self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> AnyPairs:
        return every_view_in_turn(rows["anchor"], rows["key"], labels=rows.get("labels"), index=rows.get("index"))

    def metrics(self) -> dict[str, Tensor | float]:
        """Return the terms of the objective and the spread of the last batch, () each. Every rank must call it."""
        found = super().metrics()
        return found if self._projected is None else found | {"spread": spread(self._projected)}


def spread(z: Tensor) -> Tensor:
    """Return the mean standard deviation of the coordinates of z / |z| over the rows of all ranks, times sqrt(d).

    About 1 if directions are spread over the sphere, 0 if all rows are one point (Chen & He 2021, Fig. 2).
    """
    directions = F.normalize(z.float(), dim=1)
    count = all_sum(directions.new_tensor(len(directions)))
    mean = all_sum(directions.sum(0)) / count
    variance = all_sum((directions - mean).square().sum(0)) / count
    return variance.sqrt().mean() * math.sqrt(directions.shape[1])


@register_framework("simsiam")
class SimSiam(Predicting):
    """Predict each view of an image from its other views, with no gradient on their side (Chen & He 2021, Algorithm 1).

    With `0.5*regression` the loss is D(p1, z2)/2 + D(p2, z1)/2 + 1. By default the projector has three layers with
    batch norm after each (Sec. 3). Two layers are those of their App. D for CIFAR.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = SimSiam(backbone)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        predictor: from embeddings (n, d) to (n, d). None is the paper's (`prediction_head`).
    """

    projector = (3, "all")
    head_name = "simsiam"

    @classmethod
    def _default_hidden(cls, config: VisionSettings) -> int:
        return max(1, config.encoder.dim // 4)

    def _sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return [self.predictor(z) for z in projected], [z.detach() for z in projected]


Schedule = Literal["cosine", "constant"]


class BYOLConfig(PredictorConfig):
    """The [vision.byol] table."""

    momentum: float = Field(0.996, ge=0, le=1, description="of the target network, at the first step")
    momentum_schedule: Schedule = Field("cosine", description="cosine: rising to 1 over the run")


@register_framework("byol")
class BYOL(Predicting):
    """Predict from each view what a momentum copy of the network says of the other views (Grill et al. 2020).

    With `2*regression` the loss is the paper's, both directions added. By default the projector has batch norm after
    its hidden layer (Sec. 3.3).

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = BYOL(backbone, steps=1000)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])
        >>> loss.backward()  # then optimizer.step()
        >>> model.after_step()  # moves the target network

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        predictor: from embeddings (n, d) to (n, d). None is the paper's (`prediction_head`).
        momentum: of the copy, in [0, 1], at the first step.
        momentum_schedule: "cosine", which rises to 1, or "constant".
        steps: steps of the whole run, for the cosine. None keeps the momentum of the first step.
    """

    table = BYOLConfig
    projector: ClassVar[tuple[int, Norm] | None] = (2, "hidden")

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "2*regression",
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
        momentum: float = 0.996,
        momentum_schedule: Schedule = "cosine",
        steps: int | None = None,
    ) -> None:
        super().__init__(backbone, objective, head, predictor)
        check_momentum(momentum)
        check_choice("momentum_schedule", momentum_schedule, *get_args(Schedule))
        if steps is not None:
            check_whole("steps", steps)
        self.target = momentum_copy(self.branch)
        self.momentum = momentum
        self.schedule: Schedule = momentum_schedule
        self.steps = steps

    def _sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        with torch.no_grad():
            keys = [self.target(view).to(projected[0].dtype) for view in batch.views]
        return [self.predictor(z) for z in projected], keys

    @property
    def momentum_now(self) -> float:
        """The momentum of this step."""
        if self.schedule == "constant":
            return self.momentum
        return cosine_schedule(self.progress, 1.0, self.momentum, 1.0)

    def update(self) -> None:
        momentum_update(self.target, self.branch, self.momentum_now)

    def metrics(self) -> dict[str, Tensor | float]:
        return {**super().metrics(), "momentum": self.momentum_now}


class MoCoV3Config(BYOLConfig):
    """The [vision.mocov3] table."""

    predictor_norm: Norm = Field("all", description="batch norm in the predictor: after no layer, the hidden, all")
    momentum: float = Field(0.99, ge=0, le=1, description="of the key encoder, at the first step")


@register_framework("mocov3")
class MoCoV3(BYOL):
    """MoCo with a predictor and without a queue (Chen, Xie & He 2021, Algorithm 1).

    The paper's loss is 2 tau (ctr(q1, k2) + ctr(q2, k1)). Here the directions are averaged: for temperature tau,
    `4 tau * infonce(temperature=tau)` is the paper's. By default the projector has three layers and batch norm after
    each (Sec. 4, ViT). The authors' ResNet-50 has two layers, and no batch norm at the predictor's end.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = MoCoV3(backbone, steps=1000)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        predictor: from embeddings (n, d) to (n, d). None is the paper's (`prediction_head`).
        momentum: of the copy, in [0, 1], at the first step.
        momentum_schedule: "cosine", which rises to 1, or "constant".
        steps: steps of the whole run, for the cosine. None keeps the momentum of the first step.
    """

    table = MoCoV3Config
    projector = (3, "all")
    head_name = "mocov3"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "0.8*infonce(temperature=0.2)",
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
        momentum: float = 0.99,
        momentum_schedule: Schedule = "cosine",
        steps: int | None = None,
    ) -> None:
        super().__init__(backbone, objective, head, predictor, momentum, momentum_schedule, steps)


class NNCLRConfig(PredictorConfig):
    """The [vision.nnclr] table."""

    support: int = Field(98_304, ge=1, description="past embeddings to search for the nearest neighbour, |Q|")


@register_framework("nnclr")
class NNCLR(Predicting):
    """Contrast the nearest neighbour of a view with predictions of the other views (Dwibedi et al. 2021, Eqs. 3-4).

    The neighbour comes from a queue Q and is the anchor, without gradient. Its positives are the predictions of the
    image's other views, its negatives those of the other images. After the step, Q takes the first view's projections
    of all ranks. Q starts with random unit vectors. By default the projector has three layers and batch norm after
    each.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = NNCLR(backbone, support=4096)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])
        >>> loss.backward()  # then optimizer.step()
        >>> model.after_step()  # fills Q

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        predictor: from embeddings (n, d) to (n, d). None is the paper's (`prediction_head`).
        support: past embeddings, |Q|.
    """

    table = NNCLRConfig
    projector = (3, "all")
    head_name = "nnclr"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "infonce(temperature=0.1)",
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
        support: int = 98_304,
    ) -> None:
        super().__init__(backbone, objective, head, predictor)
        self.queue = placed_like(Queue(support, self.embedding_dim), self.backbone)

    def _sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        self._fresh.add(projected[0])
        support = self.queue.all(projected[0].dtype)
        return [nearest_in(support, z.detach()) for z in projected], [self.predictor(z) for z in projected]


@torch.no_grad()
def nearest_in(support: Tensor, z: Tensor) -> Tensor:
    """Return the row of support (Q, d), of unit length, with the largest cosine to each z (n, d)."""
    return support[(F.normalize(z, dim=1) @ support.T).argmax(1)]
