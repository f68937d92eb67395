"""A trained ResNet under timm's names, for `timm.create_model("local-dir:FOLDER")`.

timm's ResNets have torchvision's names: conv1, bn1, layer1.0.conv1, layer1.0.bn1, ..., layer2.0.downsample.0 and .1.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dipole.core.train.exports import Card
from dipole.core.utils.errors import ConfigError
from dipole.vision.encoders import Encoder
from dipole.vision.encoders.networks import ResNetEncoder
from dipole.vision.export import TrainedModel

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def timm_weights(encoder: Encoder) -> dict[str, Tensor]:
    """Return the weights of a ResNet with the ImageNet stem under timm's names."""
    inner: Any = getattr(getattr(encoder, "model", None), "timm_model", None)
    if inner is not None:  # a model of timm that transformers wraps
        return dict(inner.state_dict())
    if not isinstance(encoder, ResNetEncoder) or encoder.stem != "imagenet":
        name = f"a {type(getattr(encoder, 'model', encoder)).__name__}"
        if isinstance(encoder, ResNetEncoder):
            name = "a ResNet with a 3x3 stem"
        raise ConfigError(
            f"timm has no network like {name}; export a run whose vision.encoder.name is resnet18 or resnet50 with "
            "vision.encoder.stem = 'imagenet', or choose --to transformers or onnx."
        )
    found: dict[str, Tensor] = {}
    for stage, number, place, layer in encoder.layers():
        conv, norm = (f"conv{place}", f"bn{place}") if place else ("downsample.0", "downsample.1")
        where = f"layer{stage}.{number}." if stage else ""
        found[f"{where}{conv}.weight"] = layer.convolution.weight
        for part in NORM:
            found[f"{where}{norm}.{part}"] = getattr(layer.normalization, part)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def export(model: TrainedModel, folder: Path, record: Any, objective: Any) -> Card:
    """Write model.safetensors, and config.json as in timm's Hub folders."""
    encoder = model.module.trained_encoder()
    weights = timm_weights(encoder)
    channels, size = model.channels, model.size
    inner = getattr(getattr(encoder, "model", None), "config", None)
    name = str(getattr(inner, "architecture", None) or model.config.encoder.name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    mean, std = (encoder.get_buffer(part).tolist() for part in ("mean", "std"))
    pretrained = {
        "input_size": [channels, size, size], "fixed_input_size": False, "pool_size": None,
        "interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "center", "mean": mean, "std": std,
        "num_classes": 0, "first_conv": "conv1", "classifier": "fc",
    }  # fmt: skip
    config = {
        "architecture": name, "num_classes": 0, "num_features": encoder.taps[encoder.last], "global_pool": "avg",
        "model_args": {"in_chans": channels}, "pretrained_cfg": pretrained,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    usage = """
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True, num_classes=0).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
features = model(transform(image).unsqueeze(0))
"""
    what = f"A {name} (method {model.config.method}) under timm's names."
    return Card(what, usage, "image-feature-extraction", "timm", ("vision",))
