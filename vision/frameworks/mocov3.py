"""MoCo v3: predictions against a slowly moving copy's projections, the other images of the batch repel."""

from __future__ import annotations

from pydantic import Field

from dipole.vision.frameworks.base import register_framework
from dipole.vision.frameworks.predictor import Following, PredictorConfig, Schedule
from dipole.vision.heads import Norm


class MoCoV3Config(PredictorConfig):
    """The [vision.mocov3] table."""

    predictor_norm: Norm = Field("all", description="batch norm in the predictor: behind no layer, the hidden, all")
    momentum: float = Field(0.99, ge=0, le=1, description="of the key encoder, at the first step")
    momentum_schedule: Schedule = Field("cosine", description="rising to 1 over the run, or the same throughout")


@register_framework("mocov3")
class MoCoV3(Following):
    """Chen, Xie & He 2021, Algorithm 1: a key encoder that follows, a predictor, and no queue.

    The paper's loss is 2 tau (ctr(q1, k2) + ctr(q2, k1)), here the directions are averaged: for temperature tau,
    `4 tau * infonce(temperature=tau)` is the paper's. The projector has three layers and batch norm behind all where
    nothing else is set (Sec. 4, ViT); the authors' ResNet-50 has two, and no batch norm at the predictor's end.
    """

    table = MoCoV3Config
    projector = (3, "all")
    called = "mocov3"
