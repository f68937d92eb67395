"""Image encoders, one file each (the folder is listed), and the projector after them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import Field, PlainSerializer, WrapValidator, model_validator
from torch import nn

from dipole.core.utils.backbone import is_random
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.plugins import import_all
from dipole.vision.encoders.base import ENCODERS, PREFIX, Encoder, EncoderSettings, as_encoder, builder, mlp

import_all(__name__)


def _name(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, str) and builder(value) is not None else check(value)


if TYPE_CHECKING:
    EncoderName = str
else:
    EncoderName = Annotated[Literal[tuple(ENCODERS)], WrapValidator(_name), PlainSerializer(str)]

_HUB_ONLY = ("pooling", "freeze", "lora", "weights", "revision")


class EncoderConfig(EncoderSettings):
    """The [vision.encoder] table."""

    name: EncoderName = Field("small-conv", description=EncoderSettings.model_fields["name"].description)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in _HUB_ONLY if getattr(self, name) != type(self).model_fields[name].default]
        if given and not self.is_hub:
            raise ValueError(f"{', '.join(given)}: no effect with encoder {self.name!r}; name = '{PREFIX}ID-or-folder'")
        if self.std is not None and not all(each > 0 for each in self.std):
            raise ValueError(f"std must be above 0, got {list(self.std)}")
        if self.is_hub and self.revision is not None and self.source.path is not None:
            raise ValueError(f"revision: has no effect with a folder, {self.source.text!r}; it belongs to a Hub name")
        return self

    def determining(self) -> dict[str, Any]:
        """Identify a folder by its content, and a name on the Hub by the name and its revision."""
        found = super().determining()
        if self.is_hub and (content := self.source.content):
            found["name"] = PREFIX + content
        return found


def build_encoder(config: EncoderSettings, channels: int, size: int, share: float = 1.0) -> Encoder:
    """Build an encoder for images (channels, size, size), with a share of the width of each layer."""
    build = builder(config.name)
    assert build is not None  # the configuration has checked it
    encoder = as_encoder(build(channels, size, config, share), channels, size)
    encoder.check_tap(config.tap)
    image = torch.linspace(0, 1, channels * size * size).view(1, channels, size, size)
    inputs = iter([image, torch.cat([image, image.flip(1, 2) ** 2])])  # alone, and in a batch
    if is_random(encoder, lambda: encoder(next(inputs))[:1]):
        named = type(getattr(encoder, "model", encoder)).__name__
        raise ConfigError(
            f"vision.encoder.name: {config.name!r} ({named}) is random in evaluation mode, or depends on the batch: "
            "one image got two different vectors. Choose another encoder, or switch off what ignores eval(), such as a "
            "mask, dropout or batch norm without running statistics."
        )
    if not config.is_hub and (config.mean or config.std):
        encoder.fix_statistics(config.mean or (0.0,), config.std or (1.0,))
    return encoder


def build_projector(config: EncoderSettings, width: int) -> tuple[nn.Module, int]:
    """Return the projector for features of `width`, and the width of the embedding."""
    if config.projector == "none":
        return nn.Identity(), width
    if config.projector == "linear":
        return nn.Linear(width, config.dim), config.dim
    hidden = [config.hidden or width] * ((config.projector_layers or 2) - 1)
    return mlp([width, *hidden, config.dim], config.projector_norm or "none"), config.dim
