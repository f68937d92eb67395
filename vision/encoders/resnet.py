"""ResNet-18 and -50 on transformers' implementation."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dipole.vision.encoders.base import Encoder, EncoderSettings, Stem, register_encoder


class ResNetEncoder(Encoder):
    """The pooled features of a ResNet."""

    def __init__(self, channels: int, name: str, stem: Stem, share: float = 1.0) -> None:
        super().__init__(channels)
        # Imported here: only a ResNet waits for transformers.
        from dipole.vision.resnet import StemResNetModel, resnet_config

        config = resnet_config(name, stem, channels, share)
        self.model: Any = StemResNetModel(config)
        self.taps = {"pooled": list(config.hidden_sizes or ())[-1]}

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
