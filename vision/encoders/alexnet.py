"""The small AlexNet of the contrastive papers."""

from torch import nn

from dipole.core.utils.errors import ConfigError
from dipole.vision.encoders.base import Encoder, EncoderSettings, Stages, conv_norm, register_encoder, scaled


@register_encoder("alexnet")
def alexnet(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
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
        *conv_norm(channels, a), pool, *conv_norm(a, b), pool,
        *conv_norm(b, c), *conv_norm(c, c), *conv_norm(c, b), pool,
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
