"""VGG-16."""

from torch import nn

from dipole.vision.encoders.base import Encoder, EncoderSettings, Stages, conv_norm, register_encoder, scaled


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
