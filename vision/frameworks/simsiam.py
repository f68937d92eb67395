"""SimSiam: one network, a predictor, a stopped gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from torch import Tensor

from dipole.vision.frameworks.base import Batch, register_framework
from dipole.vision.frameworks.predictor import Predicting, PredictorConfig

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig


class SimSiamConfig(PredictorConfig):
    """The [vision.simsiam] table."""

    predictor_hidden: int | None = Field(
        None, ge=1, description="hidden units of the predictor; default a quarter of the embedding's width"
    )


@register_framework("simsiam")
class SimSiam(Predicting):
    """Chen & He 2021, Algorithm 1: predictions of a view are set beside the image's other views, without gradient.

    With `0.5*regression` the loss is D(p1, z2)/2 + D(p2, z1)/2 + 1. The projector has three layers with batch norm
    behind all, where nothing else is set (Sec. 3); two layers are those of their App. D for CIFAR.
    """

    table = SimSiamConfig
    projector = (3, "all")
    called = "simsiam"

    @classmethod
    def default_hidden(cls, config: VisionConfig) -> int:
        return max(1, config.encoder.dim // 4)

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return [self.predictor(z) for z in projected], [z.detach() for z in projected]
