"""Image encoders with feature taps: a file each, found by listing this folder; and the projector behind them."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from torch import nn

from dipole.core.ground.plugins import import_all
from dipole.core.train.config import Settings
from dipole.vision.encoders.base import ENCODERS, Encoder, Stem, register_encoder
from dipole.vision.heads import Norm, mlp

__all__ = ["Encoder", "EncoderConfig", "build_encoder", "build_projector", "register_encoder"]

import_all(__name__)

if TYPE_CHECKING:
    EncoderName = str
else:
    EncoderName = Literal[tuple(ENCODERS)]


class EncoderConfig(Settings):
    """The [vision.encoder] table."""

    name: EncoderName = "small-conv"
    stem: Stem = Field("cifar", description="resnet only: 3x3 stride 1 without pooling, or 7x7 stride 2 with pooling")
    width: int = Field(16, ge=1, description="small-conv: channels of the first stage; linear: output features")
    tap: str | None = Field(
        None, description="the layer that probes see, such as fc7 or pooled; default the encoder's last"
    )
    channels_last: bool | None = Field(
        None, description="keep images with their channels last in memory; default on CUDA only"
    )
    projector: Literal["none", "linear", "mlp"] = Field("mlp", description="what stands between encoder and objective")
    hidden: int | None = Field(None, ge=1, description="mlp projector: hidden units; default the encoder's width")
    projector_layers: int | None = Field(
        None, ge=2, description="mlp projector: linear layers; default the framework's, 2 where it has none"
    )
    projector_norm: Norm | None = Field(
        None,
        description="mlp projector: batch norm behind no layer, the hidden ones, or all; default the framework's, none "
        "where it has none",
    )
    dim: int = Field(128, ge=1, description="width of the embedding behind a projector")


def build_encoder(config: EncoderConfig, channels: int, size: int, share: float = 1.0) -> Encoder:
    """The encoder of a [vision.encoder] table for images (channels, size, size); the tap is checked.

    share: of the width of every layer but vgg16's last; CMC's two encoders have one half each.
    """
    encoder = ENCODERS[config.name](channels, size, config, share)
    encoder.check_tap(config.tap)
    return encoder


def build_projector(config: EncoderConfig, width: int) -> tuple[nn.Module, int]:
    """The projector behind features of `width`, and the width of the embedding."""
    if config.projector == "none":
        return nn.Identity(), width
    if config.projector == "linear":
        return nn.Linear(width, config.dim), config.dim
    hidden = [config.hidden or width] * ((config.projector_layers or 2) - 1)
    return mlp([width, *hidden, config.dim], config.projector_norm or "none"), config.dim
