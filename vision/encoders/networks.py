"""ResNets on transformers' implementation, and the small networks of the papers."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dipole.core.utils.errors import ConfigError
from dipole.vision.encoders.base import Encoder, EncoderSettings, Stages, Stem, conv_norm, register_encoder, scaled

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


class ResNetEncoder(Encoder):
    """The pooled features of a ResNet, with strides in the 3x3 convolutions, as in torchvision.

    share: of the width of the residual stages. The stem always has 64 channels, as in CMC's ResNets of half width.
    """

    def __init__(self, channels: int, name: str, stem: Stem, share: float = 1.0) -> None:
        super().__init__(channels)
        # Imported here: only a ResNet waits for transformers.
        from transformers import ResNetConfig, ResNetModel

        from dipole.vision.modeling_dipole_vision import with_small_stem

        layer, widths = "bottleneck", (256, 512, 1024, 2048)
        if name == "resnet18":
            layer, widths = "basic", (64, 128, 256, 512)
        shape: dict[str, Any] = {"num_channels": channels, "embedding_size": 64, "layer_type": layer}
        sizes = [scaled(width, share) for width in widths]
        self.stem = stem
        self.model: Any = ResNetModel(ResNetConfig(hidden_sizes=sizes, depths=list(DEPTHS[name]), **shape))
        if stem == "cifar":
            with_small_stem(self.model).post_init()
        self.taps = {"pooled": sizes[-1]}

    def forward(self, images: Tensor, tap: str | None = None) -> Tensor:
        return self.model(pixel_values=self.normalize(images)).pooler_output.flatten(1)

    def layers(self) -> Iterator[tuple[int, int, int, Any]]:
        """Yield (stage, block, place, layer) of each convolution with its norm. Stage 0: stem, place 0: shortcut."""
        yield 0, 0, 1, self.model.embedder.embedder
        for stage, blocks in enumerate(self.model.encoder.stages, 1):
            for number, block in enumerate(blocks.layers):
                for place, layer in enumerate(block.layer, 1):
                    yield stage, number, place, layer
                if hasattr(block.shortcut, "convolution"):
                    yield stage, number, 0, block.shortcut


@register_encoder("resnet50")
@register_encoder("resnet18")
def resnet(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """ResNet-18 or -50 (He et al. 2016) on transformers' ResNetModel, with either stem."""
    return ResNetEncoder(channels, config.name, config.stem, share)


@register_encoder("small-conv")
def small_conv(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """Four 3x3 convolutions of width w, 2w, 4w, 4w with two strides of 2, averaged to 2x2: minutes on a processor."""
    w = scaled(config.width, share)
    shapes = (channels, w, 1), (w, 2 * w, 2), (2 * w, 4 * w, 2), (4 * w, 4 * w, 1)
    convolutions = [layer for shape in shapes for layer in conv_norm(*shape)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return Stages(channels, {"conv": nn.Sequential(*convolutions), "pooled": pool}, {"pooled": 16 * w})


@register_encoder("alexnet")
def alexnet(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """The small AlexNet of Wang & Isola (2020, App. B) after Tian et al.: five convolutions, fc6 and fc7 of 4096.

    Their fc8 is `projector = "linear"`. Three pools of width 3 and stride 2 need sides of 15 pixels or more.
    """
    for _ in range(3):
        size = (size - 3) // 2 + 1
    if size < 1:
        raise ConfigError("vision.encoder.name: alexnet needs 15 x 15 pixels or more. Set vision.augment.size.")
    pool = nn.MaxPool2d(3, 2)
    a, b, c, hidden = (scaled(width, share) for width in (96, 192, 384, 4096))
    convolutions = nn.Sequential(
        *conv_norm(channels, a), pool, *conv_norm(a, b), pool,
        *conv_norm(b, c), *conv_norm(c, c), *conv_norm(c, b), pool,
    )  # fmt: skip

    def full(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True))

    flat = b * size * size
    stages: dict[str, nn.Module] = {"conv5": nn.Sequential(convolutions, nn.Flatten())}
    stages |= {"fc6": full(flat), "fc7": full(hidden)}
    return Stages(channels, stages, {"conv5": flat, "fc6": hidden, "fc7": hidden})


@register_encoder("vgg16")
def vgg16(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """VGG-16's thirteen convolutions with batch norm, pooled to 512, then a 512x100 layer (Arora et al. 2019)."""
    layers: list[nn.Module] = []
    inputs = channels
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        outputs = scaled(width, share)
        for _ in range(count):
            layers += conv_norm(inputs, outputs)
            inputs = outputs
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    pooled = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Stages(channels, {"pooled": pooled, "fc": nn.Linear(inputs, 100)}, {"pooled": inputs, "fc": 100})


@register_encoder("linear")
def linear(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """One linear map of the pixels without bias."""
    width = scaled(config.width, share)
    stage = nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, width, bias=False))
    return Stages(channels, {"map": stage}, {"map": width})
