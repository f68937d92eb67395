"""What an encoder is, how it is registered, and what several are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from dipole.core.ground.errors import ConfigError, nearest
from dipole.vision.registry import Entries

if TYPE_CHECKING:
    from dipole.vision.encoders import EncoderConfig

Stem = Literal["cifar", "imagenet"]


class Encoder(nn.Module):
    """Images (n, C, H, W) in [0, 1] to features; `taps` names the layers that can be read and their widths.

    `forward(images)` gives the last tap, `forward(images, tap)` another. Normalisation by the training set's mean and
    standard deviation is part of the module, so that saved weights need nothing beside them.
    """

    taps: dict[str, int]

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def set_statistics(self, mean: list[float] | Tensor, std: list[float] | Tensor) -> None:
        self.get_buffer("mean").copy_(torch.as_tensor(mean))
        self.get_buffer("std").copy_(torch.as_tensor(std))

    def normalize(self, images: Tensor) -> Tensor:
        return (images - self.get_buffer("mean")[:, None, None]) / self.get_buffer("std")[:, None, None]

    @property
    def last(self) -> str:
        return list(self.taps)[-1]

    def check_tap(self, tap: str | None) -> str:
        tap = tap or self.last
        if tap not in self.taps:
            raise ConfigError(
                f"vision.encoder.tap: {type(self).__name__} has no layer {tap!r}.{nearest(tap, self.taps)} "
                f"Allowed: {', '.join(self.taps)}."
            )
        return tap


class Stages(Encoder):
    """An encoder that is a chain of stages; the output of a named stage is a tap."""

    def __init__(self, channels: int, stages: dict[str, nn.Module], taps: dict[str, int]) -> None:
        super().__init__(channels)
        self.stages = nn.ModuleDict(stages)
        self.taps = taps

    def forward(self, images: Tensor, tap: str | None = None) -> Tensor:
        x = self.normalize(images)
        for name, stage in self.stages.items():
            x = stage(x)
            if name == tap:
                break
        return x.flatten(1)


def scaled(width: int, share: float) -> int:
    """A share of a layer's width, one channel at least."""
    return max(1, round(width * share))


# (channels, side of the images in pixels, settings, share of every layer's width) -> encoder
Builder = Callable[[int, int, "EncoderConfig", float], Encoder]

ENCODERS: Entries[Builder] = Entries("an encoder")


def register_encoder(name: str) -> Callable[[Builder], Builder]:
    """Make `build(channels, size, config, share)` the encoder of that name, as vision.encoder.name spells it."""

    def decorate(build: Builder) -> Builder:
        ENCODERS.add(name, build)
        return build

    return decorate


def conv_norm(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """A 3x3 convolution without bias, batch norm, ReLU."""
    return [
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
