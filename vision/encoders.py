"""Image encoders with feature taps, and the projector behind them."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole.core.ground.errors import ConfigError, nearest
from dipole.core.train.config import Settings

Stem = Literal["cifar", "imagenet"]


class EncoderConfig(Settings):
    """The [vision.encoder] table."""

    name: Literal["small-conv", "alexnet", "resnet18", "resnet50", "vgg16", "linear"] = "small-conv"
    stem: Stem = Field("cifar", description="resnet only: 3x3 stride 1 without pooling, or 7x7 stride 2 with pooling")
    width: int = Field(16, ge=1, description="small-conv: channels of the first stage; linear: output features")
    tap: str | None = Field(
        None, description="the layer that probes see, such as fc7 or pooled; default the encoder's last"
    )
    projector: Literal["none", "linear", "mlp"] = Field("mlp", description="what stands between encoder and objective")
    hidden: int | None = Field(None, ge=1, description="mlp projector: hidden units; default the encoder's width")
    dim: int = Field(128, ge=1, description="width of the embedding behind a projector")


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

    def set_statistics(self, mean: list[float], std: list[float]) -> None:
        self.get_buffer("mean").copy_(torch.tensor(mean))
        self.get_buffer("std").copy_(torch.tensor(std))

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


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def small_conv(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder:
    """Four 3x3 convolutions of width w, 2w, 4w, 4w with two strides of 2, averaged to 2x2: minutes on a processor."""
    w = scaled(config.width, share)
    convolutions = [*_conv(channels, w), *_conv(w, 2 * w, 2), *_conv(2 * w, 4 * w, 2), *_conv(4 * w, 4 * w)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return Stages(channels, {"conv": nn.Sequential(*convolutions), "pooled": pool}, {"pooled": 16 * w})


def alexnet(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder:
    """The small AlexNet of Wang & Isola (2020, App. B) after Tian et al.: five convolutions, fc6 and fc7 of 4096.

    Their fc8 is `projector = "linear"`. Three pools of width 3 and stride 2 need sides of 15 pixels or more.
    """
    for _ in range(3):
        size = (size - 3) // 2 + 1
    if size < 1:
        raise ConfigError(
            "vision.encoder.name: alexnet needs images of 15 x 15 pixels or more; set vision.augment.size."
        )
    pool = nn.MaxPool2d(3, 2)
    a, b, c, hidden = (scaled(width, share) for width in (96, 192, 384, 4096))
    convolutions = nn.Sequential(
        *_conv(channels, a), pool, *_conv(a, b), pool, *_conv(b, c), *_conv(c, c), *_conv(c, b), pool
    )  # fmt: skip

    def full(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True))

    flat = b * size * size
    stages: dict[str, nn.Module] = {
        "conv5": nn.Sequential(convolutions, nn.Flatten()),
        "fc6": full(flat),
        "fc7": full(hidden),
    }
    return Stages(channels, stages, {"conv5": flat, "fc6": hidden, "fc7": hidden})


def vgg16(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder:
    """VGG-16's thirteen convolutions with batch norm, pooled to 512, then a 512x100 layer (Arora et al. 2019)."""
    layers: list[nn.Module] = []
    inputs = channels
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        outputs = scaled(width, share)
        for _ in range(count):
            layers += _conv(inputs, outputs)
            inputs = outputs
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    pooled = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Stages(channels, {"pooled": pooled, "fc": nn.Linear(inputs, 100)}, {"pooled": inputs, "fc": 100})


def linear(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder:
    """One linear map of the pixels without bias."""
    width = scaled(config.width, share)
    stage = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, width, bias=False))
    return Stages(channels, {"map": stage}, {"map": width})


def resnet(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder:
    """ResNet-18 or -50 (He et al. 2016) on transformers' ResNetModel, with either stem."""
    from dipole.vision.resnet import ResNetEncoder

    return ResNetEncoder(channels, config.name, config.stem, share)


BUILDERS: dict[str, Callable[[int, int, EncoderConfig, float], Encoder]] = {
    "small-conv": small_conv,
    "alexnet": alexnet,
    "resnet18": resnet,
    "resnet50": resnet,
    "vgg16": vgg16,
    "linear": linear,
}


def build_encoder(config: EncoderConfig, channels: int, size: int, share: float = 1.0) -> Encoder:
    """The encoder of a [vision.encoder] table for images (channels, size, size); the tap is checked.

    share: of the width of every layer but vgg16's last; CMC's two encoders have one half each.
    """
    encoder = BUILDERS[config.name](channels, size, config, share)
    encoder.check_tap(config.tap)
    return encoder


def build_projector(config: EncoderConfig, width: int) -> tuple[nn.Module, int]:
    """The projector behind features of `width`, and the width of the embedding."""
    if config.projector == "none":
        return nn.Identity(), width
    if config.projector == "linear":
        return nn.Linear(width, config.dim), config.dim
    hidden = config.hidden or width
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, config.dim)), config.dim


def extract(encoder: Callable[..., Tensor], batches: Any) -> Tensor:
    """Features (n, d) float32 on the CPU of an iterable of image batches, without gradient."""
    with torch.no_grad():
        return torch.cat([encoder(batch).float().cpu() for batch in batches])
