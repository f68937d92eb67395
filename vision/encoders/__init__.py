"""Image encoders with feature taps: a file each, found by listing this folder; and the projector behind them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, WrapValidator, model_validator
from torch import nn

from dipole.core.train.config import Settings
from dipole.core.train.finetuning import FREEZE_HELP, LORA_HELP, WEIGHTS_HELP, FreezeSetting, LoraTable
from dipole.core.utils.backbone import Source, Weights
from dipole.core.utils.plugins import import_all
from dipole.vision.encoders.base import ENCODERS, Encoder, Stem, builder, open_ended, register_encoder
from dipole.vision.encoders.hub import PREFIX, Pooling
from dipole.vision.encoders.processor import Statistics
from dipole.vision.heads import Norm, mlp

__all__ = ["Encoder", "EncoderConfig", "build_encoder", "build_projector", "register_encoder"]

import_all(__name__)


def _name(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, str) and open_ended(value) else check(value)


if TYPE_CHECKING:
    EncoderName = str
else:
    EncoderName = Annotated[Literal[tuple(ENCODERS)], WrapValidator(_name), PlainSerializer(str)]

_OF_HUB = ("pooling", "freeze", "lora", "weights", "revision")


class EncoderConfig(Settings):
    """The [vision.encoder] table."""

    name: EncoderName = Field(
        "small-conv", description="which encoder; hub:ID or hub:FOLDER is a model of transformers"
    )
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
    pooling: Pooling | None = Field(
        None,
        description="hub only: pooler (the architecture's own), cls (the class token), mean or max (of patches or "
        "places); default the first of these that there is and that has its weights",
    )
    freeze: FreezeSetting = Field("none", description=f"hub only: {FREEZE_HELP}")
    lora: LoraTable | None = Field(None, description=f"hub only: {LORA_HELP}")
    weights: Weights | None = Field(None, description=f"hub only: {WEIGHTS_HELP}")
    revision: str | None = Field(None, description="hub only: branch, tag or commit; default main")
    mean: Statistics | None = Field(
        None,
        description="of every channel in [0, 1], as images are normalised; default the image processor's for hub "
        "models that come with one, else the training set's",
    )
    std: Statistics | None = Field(None, description="the same")

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in _OF_HUB if getattr(self, name) != type(self).model_fields[name].default]
        if given and not self.is_hub:
            raise ValueError(f"{', '.join(given)}: no effect with encoder {self.name!r}; name = '{PREFIX}ID-or-folder'")
        if self.std is not None and not all(each > 0 for each in self.std):
            raise ValueError(f"std must be above 0, got {list(self.std)}")
        if self.is_hub and self.revision is not None and self.source.path is not None:
            raise ValueError(f"revision: has no effect with a folder, {self.source.text!r}; it belongs to a Hub name")
        return self

    def determining(self) -> dict[str, Any]:
        """A folder counts by what it holds, not by where it lies; a name on the Hub by itself and its revision."""
        found = super().determining()
        if self.is_hub and (content := self.source.content):
            found["name"] = PREFIX + content
        return found

    @property
    def is_hub(self) -> bool:
        """Whether it is a model of transformers from a folder or the Hub."""
        return self.name.startswith(PREFIX)

    @property
    def source(self) -> Source:
        """Where a hub model comes from."""
        return Source(self.name.removeprefix(PREFIX), "vision.encoder.name", self.weights, self.revision)


def build_encoder(config: EncoderConfig, channels: int, size: int, share: float = 1.0) -> Encoder:
    """The encoder of a [vision.encoder] table for images (channels, size, size); the tap is checked.

    share: of the width of every layer but vgg16's last; CMC's two encoders have one half each.
    """
    encoder = builder(config.name)(channels, size, config, share)
    encoder.check_tap(config.tap)
    if not config.is_hub and (config.mean or config.std):
        encoder.fix_statistics(config.mean or (0.0,), config.std or (1.0,))
    return encoder


def build_projector(config: EncoderConfig, width: int) -> tuple[nn.Module, int]:
    """The projector behind features of `width`, and the width of the embedding."""
    if config.projector == "none":
        return nn.Identity(), width
    if config.projector == "linear":
        return nn.Linear(width, config.dim), config.dim
    hidden = [config.hidden or width] * ((config.projector_layers or 2) - 1)
    return mlp([width, *hidden, config.dim], config.projector_norm or "none"), config.dim
