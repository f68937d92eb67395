"""MoCo v3: predict the projections of a slowly moving copy; the other images of the batch are negatives."""

from __future__ import annotations

from pydantic import Field

from dipole.vision.frameworks.base import register_framework
from dipole.vision.frameworks.predictor import Following, PredictorConfig, Schedule
from dipole.vision.heads import Norm


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
    """

    table = MoCoV3Config
    projector = (3, "all")
