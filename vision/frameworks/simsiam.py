"""SimSiam: one network, a predictor, a stopped gradient."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn

from dipole.vision.frameworks.base import AnyObjective, Batch, register_framework
from dipole.vision.frameworks.predictor import Predicting, PredictorConfig
from dipole.vision.settings import VisionSettings


class SimSiamConfig(PredictorConfig):
    """The [vision.simsiam] table."""

    predictor_hidden: int | None = Field(
        None, ge=1, description="hidden units of the predictor; default a quarter of the embedding's width"
    )


@register_framework("simsiam")
class SimSiam(Predicting):
    """Chen & He 2021, Algorithm 1: the prediction of a view against the image's other views, without gradient.

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

    table = SimSiamConfig
    projector = (3, "all")
    head_name = "simsiam"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "0.5*regression",
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
    ) -> None:
        super().__init__(backbone, objective, head, predictor)

    @classmethod
    def _default_hidden(cls, config: VisionSettings) -> int:
        return max(1, config.encoder.dim // 4)

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return [self.predictor(z) for z in projected], [z.detach() for z in projected]
