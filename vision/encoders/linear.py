"""A linear map of the pixels."""

from typing import TYPE_CHECKING

from torch import nn

from dipole.vision.encoders.base import Encoder, Stages, register_encoder, scaled

if TYPE_CHECKING:
    from dipole.vision.encoders import EncoderConfig


@register_encoder("linear")
def linear(channels: int, size: int, config: "EncoderConfig", share: float) -> Encoder:
    """One linear map of the pixels without bias."""
    width = scaled(config.width, share)
    stage = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, width, bias=False))
    return Stages(channels, {"map": stage}, {"map": width})
