"""What a framework is built for."""

from __future__ import annotations

from dataclasses import dataclass

from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector
from dipole.vision.frameworks.branch import Branch
from dipole.vision.image_set import ImageSet


@dataclass(frozen=True)
class Setup:
    """The images, sizes and encoder that a framework is built for.

    Args:
        images: those of pretraining.
        size: side of the views in pixels.
        batch_size: images of a step over all ranks.
        encoder: its table.
    """

    images: ImageSet
    size: int
    batch_size: int
    encoder: EncoderConfig

    def branch(self, channels: int | None = None, share: float = 1.0) -> Branch:
        """Return an encoder with its projector.

        Args:
            channels: of the images. By default those of the data set.
            share: of the width of every layer of the encoder, > 0.
        """
        channels = channels or self.images.channels
        encoder = build_encoder(self.encoder, channels, self.size, share)
        if channels == self.images.channels and not encoder.own_statistics:
            encoder.set_statistics(*self.images.statistics)
        projector, width = build_projector(self.encoder, encoder.taps[encoder.last])
        return Branch(encoder, projector, self.encoder.tap, width)
