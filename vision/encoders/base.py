"""What an encoder is, how it is registered, and what several are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.text import counted
from dipole.vision.registry import Entries

__all__ = [
    "Encoder",
    "Stages",
    "register_encoder",
]

if TYPE_CHECKING:
    from dipole.vision.encoders import EncoderConfig

Stem = Literal["cifar", "imagenet"]


class Encoder(nn.Module):
    """Images (n, C, H, W) in [0, 1] to features; `taps` names the layers that can be read and their widths.

    `forward(images)` gives the last tap, `forward(images, tap)` another, (n, width) each. Normalisation by the training
    set's mean and standard deviation is part of the module, so that saved weights need nothing beside them.

    Args:
        channels: C.
    """

    taps: dict[str, int]
    own_statistics: bool = False  # that the training set's do not replace
    remarks: Sequence[str] = ()  # what a user is told when it is built
    described: Mapping[str, Any] | None = None  # what the record says of it

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def set_statistics(self, mean: list[float] | Tensor, std: list[float] | Tensor) -> None:
        """Normalise by these.

        Args:
            mean: (C,) of each channel in [0, 1], or (1,) of all.
            std: (C,) or (1,) likewise, > 0.
        """
        self.get_buffer("mean").copy_(torch.as_tensor(mean))
        self.get_buffer("std").copy_(torch.as_tensor(std))

    def fix_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Normalise by these, whatever the training set's are.

        Args:
            mean: of each channel in [0, 1], or one of all.
            std: likewise, > 0.

        Raises:
            ConfigError: as many values as neither.
        """
        channels = len(self.get_buffer("mean"))
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"vision.encoder.{name}: {counted(len(values), 'value')} for {counted(channels, 'channel')}; give "
                    f"1 or {channels}."
                )
        self.set_statistics(list(mean), list(std))
        self.own_statistics = True

    def normalize(self, images: Tensor) -> Tensor:
        """Images with the mean taken off and divided by the standard deviation, (n, C, H, W).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        return (images - self.get_buffer("mean")[:, None, None]) / self.get_buffer("std")[:, None, None]

    @property
    def last(self) -> str:
        """Name of the last tap."""
        return list(self.taps)[-1]

    def check_tap(self, tap: str | None) -> str:
        """Name of the layer that is read.

        Args:
            tap: what a recipe says; None: the last.

        Raises:
            ConfigError: there is no such layer.
        """
        tap = tap or self.last
        if tap not in self.taps:
            raise ConfigError(
                f"vision.encoder.tap: {type(self).__name__} has no layer {tap!r}.{nearest(tap, self.taps)} "
                f"Allowed: {', '.join(self.taps)}."
            )
        return tap


class Stages(Encoder):
    """An encoder that is a chain of stages; the output of a named stage is a tap.

    Args:
        channels: C.
        stages: by name, in their order.
        taps: name of a stage -> the width of its flattened output.
    """

    def __init__(self, channels: int, stages: dict[str, nn.Module], taps: dict[str, int]) -> None:
        super().__init__(channels)
        self.stages = nn.ModuleDict(stages)
        self.taps = taps

    def forward(self, images: Tensor, tap: str | None = None) -> Tensor:
        """Features of the last stage, or of the one that is named, (n, width).

        Args:
            images: (n, C, H, W) in [0, 1].
            tap: name of a stage.
        """
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
    """Make a function the encoder of a name, as vision.encoder.name spells it.

        @register_encoder("mine")
        def build(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder: ...

    `channels` and `size`, a side in pixels, are those of the images, `config` is the table [vision.encoder], and
    `share` > 0 what of every layer's width is wanted.

    Args:
        name: that no encoder has yet; "prefix:what" stands for every name that begins with this prefix.

    Returns:
        A decorator that gives back what it decorates.

    Raises:
        RegistryError: from the decorator, if the name is taken.
    """

    def decorate(build: Builder) -> Builder:
        ENCODERS.add(name, build)
        return build

    return decorate


def open_ended(name: str) -> bool:
    """Whether an encoder's name begins as a registered "prefix:what" does and goes on."""
    prefix, colon, rest = name.partition(":")
    return bool(colon and rest) and any(each.startswith(f"{prefix}:") for each in ENCODERS)


def builder(name: str) -> Builder:
    """What builds the encoder of a name."""
    if name in ENCODERS:
        return ENCODERS[name]
    return next(build for each, build in ENCODERS.items() if each.startswith(f"{name.partition(':')[0]}:"))


def conv_norm(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """A 3x3 convolution without bias, batch norm, ReLU."""
    return [
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
