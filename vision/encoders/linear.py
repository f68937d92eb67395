"""A linear map of the pixels."""

from torch import nn

from dipole.vision.encoders.base import Encoder, EncoderSettings, Stages, register_encoder, scaled


@register_encoder("linear")
def linear(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """One linear map of the pixels without bias."""
    width = scaled(config.width, share)
    stage = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, width, bias=False))
    return Stages(channels, {"map": stage}, {"map": width})
