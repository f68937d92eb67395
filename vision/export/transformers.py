"""A trained encoder as a folder that transformers loads.

A ResNet with the ImageNet stem, and any model of transformers, is written as a model of transformers:
`AutoModel.from_pretrained(folder)` reads it without dipole. Any other encoder is written with its code in the folder:
`AutoModel.from_pretrained(folder, trust_remote_code=True)`. Both have an image processor.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, ResNetConfig, ResNetModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dipole.core.train.exports import Card
from dipole.core.utils.backbone import without_transformers_output
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.vision import modeling_dipole_vision as modeling
from dipole.vision.encoders import Encoder
from dipole.vision.encoders.base import Stages
from dipole.vision.encoders.hub import FILE as PROCESSOR
from dipole.vision.encoders.hub import HubEncoder, read_pooled, register_exports, size_options, write_processor
from dipole.vision.encoders.networks import ResNetEncoder
from dipole.vision.export import TrainedModel

CODE = "modeling_dipole_vision"
CLOSE = 1e-5  # largest difference between the run's features and the written model's
DipoleVisionConfig = modeling.DipoleVisionConfig


class Normalised(nn.Module):
    """A model of transformers after the normalisation of its image processor."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        told = json.loads((folder / PROCESSOR).read_text(encoding="utf-8"))
        register_exports()
        self.model = AutoModel.from_pretrained(folder)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(told[f"image_{name}"])[:, None, None])

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        x = (pixel_values - self.get_buffer("mean")) / self.get_buffer("std")
        return BaseModelOutputWithPooling(pooler_output=read_pooled(self.model, x))


class DipoleVisionModel(modeling.DipoleVisionModel):
    """Any folder that `dipole export --to transformers` wrote.

    `model(pixel_values)` with pixels in [0, 1], (n, C, H, W), gives `pooler_output` (n, width).
    """

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        told = Path(folder) / PROCESSOR
        if told.is_file() and "image_mean" in json.loads(told.read_text(encoding="utf-8")):
            return Normalised(Path(folder)).eval()
        return modeling.DipoleVisionModel.from_pretrained(folder, *args, **kwargs)


@without_transformers_output()
def export(model: TrainedModel, folder: Path, record: Any, objective: Any) -> Card:
    """Write config.json, model.safetensors, an image processor, and the model's code if needed."""
    encoder = model.module.trained_encoder()
    tap = encoder.check_tap(model.config.encoder.tap)
    channels, size = model.channels, model.size
    if tap != encoder.last and hasattr(encoder, "save_pretrained"):
        raise ConfigError(
            f"vision.encoder.tap: a model of transformers ends with {encoder.last!r}, and none can be written that "
            f"ends with {tap!r}; choose --to onnx."
        )
    is_plain = tap == encoder.last and (
        hasattr(encoder, "save_pretrained") or (isinstance(encoder, ResNetEncoder) and encoder.stem == "imagenet")
    )
    if not is_plain:
        _save_with_code(encoder, folder, channels, size, tap)
    elif isinstance(encoder, ResNetEncoder):
        plain = ResNetModel(ResNetConfig(**_fields(encoder)))
        plain.load_state_dict(encoder.model.state_dict())
        plain.save_pretrained(folder)
        mean, std = (encoder.get_buffer(name).tolist() for name in ("mean", "std"))
        write_processor(folder, size, channels, mean, std)
    else:
        encoder.save_pretrained(folder)  # type: ignore[operator]
    _check(model, folder)
    has_code = not is_plain or isinstance(getattr(encoder, "model", None), modeling.DipoleVisionModel)
    if has_code:
        shutil.copyfile(modeling.__file__, folder / f"{CODE}.py")
    return _card(model, encoder, has_code)


def _fields(encoder: ResNetEncoder) -> dict[str, Any]:
    """Return the settings that determine the shape of a ResNet."""
    names = ("num_channels", "embedding_size", "hidden_sizes", "depths", "layer_type")
    return {name: getattr(encoder.model.config, name) for name in names}


def describe(encoder: Encoder) -> list[Any]:
    """Return name and description of every stage of an encoder, in order."""
    if isinstance(encoder, ResNetEncoder):
        return [[encoder.last, {"kind": modeling.RESNET, **_fields(encoder)}]]
    if isinstance(encoder, Stages):
        try:
            return [[name, modeling.describe(stage)] for name, stage in encoder.stages.items()]
        except ValueError as error:
            raise ConfigError(
                f"an encoder with the layer {error} cannot be exported to transformers. Known layers: "
                f"{', '.join(modeling.LAYERS)}, in nn.Sequential."
            ) from error
    raise ConfigError(
        f"{type(encoder).__name__} cannot be exported to transformers: it is not `Stages` and has no "
        "save_pretrained(folder)."
    )


def _save_with_code(encoder: Encoder, folder: Path, channels: int, size: int, tap: str) -> None:
    config = DipoleVisionConfig(describe(encoder), channels, size, encoder.taps[tap], tap)
    config.auto_map = {"AutoConfig": f"{CODE}.DipoleVisionConfig", "AutoModel": f"{CODE}.DipoleVisionModel"}
    model = modeling.DipoleVisionModel(config)
    weights = encoder.state_dict()
    if isinstance(encoder, ResNetEncoder):
        inside = f"stages.{encoder.last}."
        weights = {name.replace("model.", inside, 1) if "." in name else name: w for name, w in weights.items()}
    model.load_state_dict(weights)
    model.eval().save_pretrained(folder)
    write_processor(folder, size, channels)


@torch.no_grad()
def _check(model: TrainedModel, folder: Path) -> None:
    """Load the folder and compare its features with the run's."""
    views = torch.rand(3, model.channels, model.size, model.size)
    wanted = model.module.features(views)
    found = DipoleVisionModel.from_pretrained(folder).eval()(views).pooler_output
    off = float((found - wanted).abs().max())
    if not off <= CLOSE * max(1.0, float(wanted.abs().max())):
        raise TrainingError(f"the exported folder would give features that differ by {off:.2g} from the run's")


def _card(model: TrainedModel, encoder: Encoder, has_code: bool) -> Card:
    trust = ", trust_remote_code=True" if has_code else ""
    options = "".join(f", {name}={value}" for name, value in size_options(getattr(encoder, "model", encoder)).items())
    output = encoder.expression if isinstance(encoder, HubEncoder) else "outputs.pooler_output.flatten(1)"
    usage = f"""
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoModel

processor, model = AutoImageProcessor.from_pretrained("FOLDER"), AutoModel.from_pretrained("FOLDER"{trust})
outputs = model(**processor(ImageOps.exif_transpose(Image.open("image.png")), return_tensors="pt"){options})
features = {output}
"""
    notes = ""
    if has_code:
        notes = (
            "The code of the model is in this folder and needs only torch and transformers. Mean and standard "
            "deviation of the training images are part of the weights. The image processor divides by 255."
        )
    what = f"An image encoder ({model.config.encoder.name}, method {model.config.method})."
    return Card(what, usage, "image-feature-extraction", "transformers", ("vision",), notes)
