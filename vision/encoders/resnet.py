"""ResNet-18 and -50 on transformers' implementation."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dipole.vision.encoders.base import Encoder, EncoderSettings, Stem, register_encoder, scaled

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


class ResNetEncoder(Encoder):
    """The pooled features of a ResNet, with strides in the 3x3 convolutions, as in torchvision.

    stem: "imagenet" (7x7, stride 2, max pool) or "cifar" (3x3, stride 1, no pool). share: of the width of the residual
    stages. The stem always has 64 channels, as in CMC's ResNets of half width.
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
