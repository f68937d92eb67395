"""An image encoder as a model of transformers, of the type "dipole_vision".

An exported folder holds a copy of this file, so that it loads without dipole:
`AutoModel.from_pretrained(folder, trust_remote_code=True)`.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, ResNetConfig, ResNetModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

LAYERS = (
    "Conv2d", "Linear", "BatchNorm1d", "BatchNorm2d", "LayerNorm", "GroupNorm", "MaxPool2d", "AvgPool2d",
    "AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "Flatten", "Dropout", "ReLU", "GELU", "SiLU", "Sigmoid", "Tanh",
    "Identity",
)  # fmt: skip
"""Layers of torch that a description can have. Their arguments are attributes of the same name."""
CHAIN = "Sequential"
RESNET = "ResNet"


def describe(module: nn.Module) -> dict[str, Any]:
    """Describe a module as JSON values for `build`. Raise ValueError for a layer that is not in `LAYERS`."""
    kind = type(module).__name__
    if type(module) is nn.Sequential:
        return {"kind": CHAIN, "layers": [[name, describe(layer)] for name, layer in module._modules.items()]}
    if kind not in LAYERS or type(module) is not getattr(nn, kind):
        raise ValueError(kind)
    told: dict[str, Any] = {"kind": kind}
    for name, argument in signature(type(module)).parameters.items():
        value = getattr(module, name, argument.default)
        if name == "bias":
            value = value is not None
        if value != argument.default:  # other versions of torch may not know a default one
            told[name] = value
    return told


def build(description: dict[str, Any]) -> nn.Module:
    """Build a new module from a description."""
    told = dict(description)
    kind = told.pop("kind")
    if kind == CHAIN:
        chain = nn.Sequential()
        for name, layer in told["layers"]:
            chain.add_module(name, build(layer))
        return chain
    if kind == RESNET:
        return with_small_stem(ResNetModel(ResNetConfig(**told)))
    if kind not in LAYERS:
        raise ValueError(f"unknown layer {kind!r}; known: {', '.join(LAYERS)}")
    return getattr(nn, kind)(**{name: tuple(v) if isinstance(v, list) else v for name, v in told.items()})


def with_small_stem(model: Any) -> Any:
    """Give transformers' ResNet a 3x3 stem of stride 1 without pooling, for images of 32 x 32."""
    channels, width = model.config.num_channels, model.config.embedding_size
    model.embedder.embedder.convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    model.embedder.pooler = nn.Identity()
    return model


class DipoleVisionConfig(PretrainedConfig):
    """Shape of an image encoder."""

    model_type = "dipole_vision"

    def __init__(
        self,
        stages: list[Any] | None = None,
        num_channels: int = 3,
        image_size: int = 32,
        hidden_size: int = 0,
        tap: str = "",
        **kwargs: Any,
    ) -> None:
        """stages: name and description of each, in order. tap: the output stage. hidden_size: its width."""
        super().__init__(**kwargs)
        self.stages, self.tap = stages, tap
        self.num_channels, self.image_size, self.hidden_size = num_channels, image_size, hidden_size


class DipoleVisionModel(PreTrainedModel):
    """`model(pixel_values)` with pixels in [0, 1], (n, C, H, W), gives `pooler_output` (n, width).

    Mean and standard deviation of the training images are part of the weights.

    Args:
        config: the shape of the encoder.
    """

    config_class = DipoleVisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: DipoleVisionConfig) -> None:
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.num_channels))
        self.register_buffer("std", torch.ones(config.num_channels))
        self.stages = nn.ModuleDict({name: build(stage) for name, stage in config.stages or ()})
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from the file."""

    def forward(self, pixel_values: Tensor, **ignored: Any) -> BaseModelOutputWithPooling:
        """Return the features of the tap as `pooler_output`, (n, width), and as a map, `last_hidden_state`.

        Args:
            pixel_values: (n, C, H, W) in [0, 1].
            ignored: further arguments of transformers.
        """
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        x = (pixel_values - mean[:, None, None]) / std[:, None, None]
        for name, stage in self.stages.items():
            x = stage(x)
            x = getattr(x, "pooler_output", x)
            if name == self.config.tap:
                break
        maps = x if x.ndim == 4 else x[:, :, None, None]
        return BaseModelOutputWithPooling(last_hidden_state=maps, pooler_output=x.flatten(1))
