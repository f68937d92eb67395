"""BYOL and MoCo v3: predict the projections of a slowly moving copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.options import check_whole
from dipole.vision.encoders.base import Norm
from dipole.vision.frameworks.base import AnyObjective, Batch, register_framework
from dipole.vision.frameworks.checks import check_choice, check_momentum
from dipole.vision.frameworks.predictor import Predicting, PredictorConfig
from dipole.vision.frameworks.queue import momentum_update
from dipole.vision.schedules import cosine_schedule

Schedule = Literal["cosine", "constant"]


class Following(Predicting):
    """Keys from a slowly moving copy of the branch, whose momentum rises to 1 along a cosine.

    Args:
        backbone, objective, head, predictor: as in `Predicting`.
        momentum: of the copy, at the first step.
        momentum_schedule: "cosine" or "constant".
        steps: steps of the whole run, for the cosine. None keeps the momentum of the first step.
    """

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
        check_choice("momentum_schedule", momentum_schedule, Schedule)
        if steps is not None:
            check_whole("steps", steps)
        self.target = copy.deepcopy(self.branch).requires_grad_(False)
        self.momentum = momentum
        self.schedule: Schedule = momentum_schedule
        self.steps = steps

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
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


class BYOLConfig(PredictorConfig):
    """The [vision.byol] table."""

    momentum: float = Field(0.996, ge=0, le=1, description="of the target network, at the first step")
    momentum_schedule: Schedule = Field("cosine", description="cosine: rising to 1 over the run")


@register_framework("byol")
class BYOL(Following):
    """Grill et al. 2020: the prediction of a view is compared with the target network's projections of the other views.

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
    projector = (2, "hidden")


class MoCoV3Config(PredictorConfig):
    """The [vision.mocov3] table."""

    predictor_norm: Norm = Field("all", description="batch norm in the predictor: after no layer, the hidden, all")
    momentum: float = Field(0.99, ge=0, le=1, description="of the key encoder, at the first step")
    momentum_schedule: Schedule = Field("cosine", description="cosine: rising to 1 over the run")


@register_framework("mocov3")
class MoCoV3(Following):
    """Chen, Xie & He 2021, Algorithm 1: a momentum key encoder, a predictor, and no queue.

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
