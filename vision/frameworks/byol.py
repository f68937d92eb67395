"""BYOL: predict the projections of a slowly moving copy."""

from __future__ import annotations

from pydantic import Field

from dipole.vision.frameworks.base import register_framework
from dipole.vision.frameworks.predictor import Following, PredictorConfig, Schedule


class BYOLConfig(PredictorConfig):
    """The [vision.byol] table."""

    momentum: float = Field(0.996, ge=0, le=1, description="of the target network, at the first step")
    momentum_schedule: Schedule = Field("cosine", description="cosine: rising to 1 over the run")


@register_framework("byol")
class BYOL(Following):
    """Grill et al. 2020: the prediction of a view is compared with the target network's projections of the other views.

    With `2*regression` the loss is the paper's, both directions added. By default the projector has batch norm after
    its hidden layer (Sec. 3.3).
    """

    table = BYOLConfig
    projector = (2, "hidden")
