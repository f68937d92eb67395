"""A trained ResNet under timm's names, for `timm.create_model("local-dir:FOLDER")`.

timm's ResNets have torchvision's names: conv1, bn1, layer1.0.conv1, layer1.0.bn1, ..., layer2.0.downsample.0 and .1.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from dipole.core.train.card import Card, write_card
from dipole.core.utils.errors import ConfigError
from dipole.vision.encoders import Encoder
from dipole.vision.encoders.resnet import ResNetEncoder
from dipole.vision.trained_model import TrainedModel

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def timm_weights(encoder: Encoder) -> dict[str, Tensor]:
    """Return the weights of a ResNet with the ImageNet stem under timm's names.

    Raises:
        ConfigError: timm has no such network.
    """
    inner: Any = getattr(getattr(encoder, "model", None), "timm_model", None)
    if inner is not None:  # a model of timm that transformers wraps
        return dict(inner.state_dict())
    if not isinstance(encoder, ResNetEncoder) or encoder.model.config.stem != "imagenet":
        name = f"a {type(getattr(encoder, 'model', encoder)).__name__}"
        if isinstance(encoder, ResNetEncoder):
            name = "a ResNet with a 3x3 stem"
        raise ConfigError(
            f"timm has no network like {name}; export a run whose vision.encoder.name is resnet18 or resnet50 with "
            "vision.encoder.stem = 'imagenet', or choose --to transformers or onnx."
        )
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _resnet(encoder.model)}


def _resnet(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from _conv_norm(model.embedder.embedder, "conv1", "bn1")
    for stage, layers in enumerate(model.encoder.stages, 1):
        for number, block in enumerate(layers.layers):
            at = f"layer{stage}.{number}"
            for place, layer in enumerate(block.layer, 1):
                yield from _conv_norm(layer, f"{at}.conv{place}", f"{at}.bn{place}")
            if hasattr(block.shortcut, "convolution"):
                yield from _conv_norm(block.shortcut, f"{at}.downsample.0", f"{at}.downsample.1")


def _conv_norm(layer: Any, conv: str, norm: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{conv}.weight", layer.convolution.weight
    for part in NORM:
        yield f"{norm}.{part}", getattr(layer.normalization, part)


def export(model: TrainedModel, folder: Path, record: Any, objective: "Composite | None") -> None:
    """Write model.safetensors, config.json as in timm's Hub folders, and README.md."""
    encoder = model.module.trained_encoder()
    weights = timm_weights(encoder)
    name, channels, size = _architecture(encoder, model), model.images.channels, model.size
    width = encoder.taps[encoder.last]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    mean, std = (encoder.get_buffer(part).tolist() for part in ("mean", "std"))
    config = {
        "architecture": name,
        "num_classes": 0,
        "num_features": width,
        "global_pool": "avg",
        "model_args": {"in_chans": channels},
        "pretrained_cfg": {
            "input_size": [channels, size, size],
            "fixed_input_size": False,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": mean,
            "std": std,
            "num_classes": 0,
            "pool_size": None,
            "first_conv": "conv1",
            "classifier": "fc",
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    usage = """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True, num_classes=0).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
features = model(transform(image).unsqueeze(0))
"""
    what = f"A {name} (method {model.config.method}) under timm's names."
    write_card(folder, Card(what, usage, "image-feature-extraction", "timm", ("vision",)), record, model.info)


def _architecture(encoder: Encoder, model: TrainedModel) -> str:
    config = getattr(getattr(encoder, "model", None), "config", None)
    return str(getattr(config, "architecture", None) or model.config.encoder.name)
