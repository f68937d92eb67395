"""A small convolutional network."""

from torch import nn

from dipole.vision.encoders.base import Encoder, EncoderSettings, Stages, conv_norm, register_encoder, scaled


@register_encoder("small-conv")
def small_conv(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """Four 3x3 convolutions of width w, 2w, 4w, 4w with two strides of 2, averaged to 2x2: minutes on a processor."""
    w = scaled(config.width, share)
    convolutions = [
        *conv_norm(channels, w),
        *conv_norm(w, 2 * w, 2),
        *conv_norm(2 * w, 4 * w, 2),
        *conv_norm(4 * w, 4 * w),
    ]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return Stages(channels, {"conv": nn.Sequential(*convolutions), "pooled": pool}, {"pooled": 16 * w})
