"""Image encoders: the settings table, the base classes, and how an encoder is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole.core.train.config import Settings
from dipole.core.train.finetuning import FREEZE_HELP, LORA_HELP, WEIGHTS_HELP, FreezeSetting, LoraTable
from dipole.core.utils.backbone import NetworkSource, Weights
from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.plugins import Entries
from dipole.core.utils.text import counted

__all__ = ["Encoder", "Stages", "register_encoder"]

PREFIX = "hub:"  # before the name or folder of a model of transformers
Stem = Literal["cifar", "imagenet"]
Pooling = Literal["pooler", "cls", "mean", "max"]
Statistics = tuple[float, ...]
Norm = Literal["none", "hidden", "all"]
"""Layers that batch norm follows: none, all but the last, or all."""


class EncoderSettings(Settings):
    """The [vision.encoder] table with any name. `EncoderConfig` checks that the encoder exists."""

    name: str = Field("small-conv", description="which encoder; hub:ID or hub:FOLDER is a model of transformers")
    stem: Stem = Field("cifar", description="resnet only: 3x3 stride 1 without pooling, or 7x7 stride 2 with pooling")
    width: int = Field(16, ge=1, description="small-conv: channels of the first stage; linear: output features")
    tap: str | None = Field(None, description="the layer that probes see, such as fc7 (default the encoder's last)")
    channels_last: bool | None = Field(None, description="channels are last in memory (default on CUDA only)")
    projector: Literal["none", "linear", "mlp"] = Field("mlp", description="the layers between encoder and objective")
    hidden: int | None = Field(None, ge=1, description="mlp projector: hidden units (default the encoder's width)")
    projector_layers: int | None = Field(None, ge=2, description="mlp: linear layers (default the framework's or 2)")
    projector_norm: Norm | None = Field(
        None, description="mlp: batch norm after no layer, the hidden, or all (default the framework's, otherwise none)"
    )
    dim: int = Field(128, ge=1, description="width of the embedding that a projector gives")
    pooling: Pooling | None = Field(
        None,
        description="hub only: pooler (the architecture's own), cls (the class token), mean or max (of patches or "
        "places). The default is the first of these that the model has with weights",
    )
    freeze: FreezeSetting = Field("none", description=f"hub only: {FREEZE_HELP}")
    lora: LoraTable | None = Field(None, description=f"hub only: {LORA_HELP}")
    weights: Weights | None = Field(None, description=f"hub only: {WEIGHTS_HELP}")
    revision: str | None = Field(None, description="hub only: branch, tag or commit (default main)")
    mean: Statistics | None = Field(
        None,
        description="mean of each channel in [0, 1] for normalisation (default that of a hub model's image processor, "
        "otherwise of the training set)",
    )
    std: Statistics | None = Field(None, description="standard deviation of each channel, as mean")

    @property
    def is_hub(self) -> bool:
        """Return whether this is a model of transformers from a folder or the Hub."""
        return self.name.startswith(PREFIX)

    @property
    def source(self) -> NetworkSource:
        """The location of a hub model."""
        return NetworkSource(self.name.removeprefix(PREFIX), "vision.encoder.name", self.weights, self.revision)


class Encoder(nn.Module):
    """Map images (n, C, H, W) in [0, 1] to features. `taps` has the names and widths of the readable layers.

    `forward(images)` returns the last tap, `forward(images, tap)` another, each (n, width). Normalisation by mean and
    standard deviation is part of the module, so saved weights need no further file.

    Args:
        channels: C.
    """

    taps: dict[str, int]
    own_statistics: bool = False  # True: the training set's statistics do not replace its own
    remarks: Sequence[str] = ()  # lines for the user when the encoder is built
    described: Mapping[str, Any] | None = None  # its description in the record

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    def set_statistics(self, mean: list[float] | Tensor, std: list[float] | Tensor) -> None:
        """Set the mean and standard deviation for normalisation.

        Args:
            mean: (C,) of each channel in [0, 1], or (1,) for all.
            std: (C,) or (1,), > 0.
        """
        self.get_buffer("mean").copy_(torch.as_tensor(mean))
        self.get_buffer("std").copy_(torch.as_tensor(std))

    def fix_statistics(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set the statistics for good: those of the training set do not replace them.

        Args:
            mean: of each channel in [0, 1], or one for all.
            std: likewise, > 0.

        Raises:
            ConfigError: the number of values is neither 1 nor C.
        """
        channels = len(self.get_buffer("mean"))
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"vision.encoder.{name}: {counted(len(values), 'value')} for {counted(channels, 'channel')}. Give "
                    f"1 or {channels}."
                )
        self.set_statistics(list(mean), list(std))
        self.own_statistics = True

    def normalize(self, images: Tensor) -> Tensor:
        """Return the images less the mean, divided by the standard deviation, (n, C, H, W).

        Args:
            images: (n, C, H, W) in [0, 1].
        """
        return (images - self.get_buffer("mean")[:, None, None]) / self.get_buffer("std")[:, None, None]

    @property
    def last(self) -> str:
        """Name of the last tap."""
        return list(self.taps)[-1]

    def check_tap(self, tap: str | None) -> str:
        """Return the name of a tap.

        Args:
            tap: a name from a recipe. None means the last tap.

        Raises:
            ConfigError: there is no such tap.
        """
        tap = tap or self.last
        if tap not in self.taps:
            raise ConfigError(
                f"vision.encoder.tap: {type(self).__name__} has no layer {tap!r}.{nearest(tap, self.taps)} "
                f"Allowed: {', '.join(self.taps)}."
            )
        return tap


class Stages(Encoder):
    """An encoder that is a chain of named stages. The flattened output of a stage is a tap.

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
        """Return the features (n, width) of a stage.

        Args:
            images: (n, C, H, W) in [0, 1].
            tap: name of a stage. None means the last.
        """
        x = self.normalize(images)
        for name, stage in self.stages.items():
            x = stage(x)
            if name == tap:
                break
        return x.flatten(1)


def as_encoder(module: nn.Module, channels: int, size: int) -> Encoder:
    """Wrap any module, images (n, channels, size, size) -> features (n, ...), as an `Encoder`."""
    if isinstance(module, Encoder):
        return module
    with in_mode(False, module), torch.no_grad():
        width = module(torch.zeros(1, channels, size, size)).flatten(1).shape[1]
    return Stages(channels, {"features": module}, {"features": width})


def mlp(widths: Sequence[int], norm: Norm = "none") -> nn.Sequential:
    """Return linear layers with ReLU between them. Batch norm after the last has no scale and shift (SimSiam)."""
    layers: list[nn.Module] = []
    last = len(widths) - 2
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        normed = norm == "all" or (norm == "hidden" and number < last)
        layers.append(nn.Linear(inputs, outputs, bias=not normed))
        if normed:
            layers.append(nn.BatchNorm1d(outputs, affine=number < last))
        if number < last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def narrow(network: nn.Module, inputs: int, channels: int) -> bool:
    """Let the first convolution, if it reads `inputs` channels, read fewer, each by an equal share of its weights."""
    first = next((part for part in network.modules() if isinstance(part, nn.Conv2d)), None)
    if first is None or first.in_channels != inputs or not isinstance(first._parameters.get("weight"), nn.Parameter):
        return False
    weight = first.weight.detach().sum(1, keepdim=True) / channels
    first.weight = nn.Parameter(weight.repeat(1, channels, 1, 1))
    first.in_channels = channels
    return True


def scaled(width: int, share: float) -> int:
    """Return a share of a layer's width, at least 1."""
    return max(1, round(width * share))


def conv_norm(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Return a 3x3 convolution without bias, batch norm and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


# (channels, side of the images in pixels, settings, share of every layer's width) -> encoder
Builder = Callable[[int, int, EncoderSettings, float], nn.Module]

ENCODERS: Entries[Builder] = Entries("an encoder")


def register_encoder(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a function under a name for vision.encoder.name. It builds an encoder.

        @register_encoder("mine")
        def build(channels: int, size: int, config: EncoderSettings, share: float) -> nn.Module: ...

    It returns an `Encoder`, or any module that maps images (n, channels, size, size) to features. `size` is a side in
    pixels, `config` the table [vision.encoder], and `share` > 0 the share of every layer's width to build.

    Args:
        name: an unused name. "prefix:what" matches every name that begins with this prefix.

    Raises:
        RegistryError: from the decorator, if the name is taken.
    """

    return ENCODERS.register(name)


def builder(name: str) -> Builder | None:
    """Return the function that builds the encoder of a name. None if there is none."""
    if name in ENCODERS:
        return ENCODERS[name]
    prefix, colon, rest = name.partition(":")
    return next((build for each, build in ENCODERS.items() if colon and rest and each.startswith(f"{prefix}:")), None)
