"""transformers' ResNet with a stem for small images; it saves and loads as any of its models."""

from typing import Any

from torch import nn
from transformers import ResNetConfig, ResNetModel

from dipole.vision.encoders.base import Stem, scaled

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


class StemResNetConfig(ResNetConfig):
    """ResNetConfig with a stem: "imagenet" (7x7, stride 2, max pool) or "cifar" (3x3, stride 1, no pool)."""

    model_type = "dipole-resnet"
    stem: str = "imagenet"


class StemResNetModel(ResNetModel):
    """ResNetModel whose stem follows its config; `from_pretrained` reads both stems."""

    config_class = StemResNetConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.stem == "cifar":
            inner = self.embedder.embedder
            inner.convolution = nn.Conv2d(config.num_channels, config.embedding_size, 3, padding=1, bias=False)
            self.embedder.pooler = nn.Identity()  # type: ignore[assignment]
            self.post_init()


def resnet_config(name: str, stem: Stem, channels: int = 3, share: float = 1.0) -> StemResNetConfig:
    """Return the config of "resnet18" or "resnet50", with strides in the 3x3 convolutions, as in torchvision.

    share: of the width of the residual stages. The stem always has 64 channels, as in CMC's ResNets of half width.
    """
    basic = name == "resnet18"
    widths = (64, 128, 256, 512) if basic else (256, 512, 1024, 2048)
    return StemResNetConfig(
        num_channels=channels,
        embedding_size=64,
        hidden_sizes=[scaled(width, share) for width in widths],
        depths=list(DEPTHS[name]),
        layer_type="basic" if basic else "bottleneck",
        stem=stem,
    )
