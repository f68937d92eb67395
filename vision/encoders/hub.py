"""Image models of transformers: ResNet, ViT, DINOv2, ConvNeXt, Swin, timm's (wrapped), and others."""

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dipole.core.train.finetuning import fine_tune, merged
from dipole.core.utils import backbone
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import atomic_write
from dipole.core.utils.freezing import fix_unused, layers, parameter_counts
from dipole.core.utils.text import counted
from dipole.vision.encoders.base import Encoder, EncoderSettings, Pooling, Statistics, narrow, register_encoder

POOLED = "dipole_pooling"  # in config.json of an exported model: the pooling, and the number of tokens before patches
MASKED = "mask_ratio"  # in config.json of a masked autoencoder: the share of patches that it hides, also in evaluation
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")


@register_encoder("hub:ID-or-folder")
def hub(channels: int, size: int, config: EncoderSettings, share: float) -> Encoder:
    """Build an image model of transformers from a folder or the Hub."""
    if share != 1:
        raise ConfigError(
            f"vision.encoder.name: {config.name!r} is as wide as its configuration says, and cannot be built with a "
            f"share of {share:g} of it. Set vision.cmc.width = 1.0."
        )
    return HubEncoder(channels, size, config)


def pooled(hidden: Tensor, pooling: Pooling, prefix: int) -> Tensor:
    """Pool tokens (n, T, d), of which the first `prefix` are no patches, or maps (n, d, H, W) to (n, d)."""
    if hidden.ndim == 4:
        return hidden.amax((2, 3)) if pooling == "max" else hidden.mean((2, 3))
    if pooling == "cls":
        return hidden[:, 0]
    patches = hidden[:, prefix:]
    return patches.mean(1) if pooling == "mean" else patches.amax(1)


def read_pooled(model: Any, pixel_values: Tensor) -> Tensor:
    """Return features (n, d) of a model of transformers, pooled as an exported config.json says."""
    outputs = model(pixel_values=pixel_values, **size_options(model))
    pooling, prefix = getattr(model.config, POOLED, (None, 0))
    pooler = outputs.get("pooler_output")
    if pooling == "pooler" or (pooling is None and pooler is not None):
        return pooler.flatten(1)
    return pooled(outputs.last_hidden_state, pooling or "mean", prefix)


def size_options(model: nn.Module) -> dict[str, Any]:
    """Return the keyword that lets a model with a position for each patch read images of any size."""
    if "interpolate_pos_encoding" in inspect.signature(model.forward).parameters:
        return {"interpolate_pos_encoding": True}
    return {}


class HubEncoder(Encoder):
    """A model of transformers that reads `pixel_values`, with pooling.

    Grey images are repeated over the model's channels. For fewer channels (CMC), the first layer is rebuilt. Taps:
    "embeddings", "layer1", ... are hidden states, pooled in the same way ("pooler": by the class token if there is one,
    else by the mean). "pooled" is the trained output.
    """

    def __init__(self, channels: int, size: int, config: EncoderSettings) -> None:
        self.source, self._size = config.source, size
        processor = processor_of(self.source)
        mean, std = config.mean or processor.mean, config.std or processor.std
        built, inputs = _load(self.source, channels)
        super().__init__(inputs if channels == 1 else channels)
        self.model = built.model
        if (mean or std) and channels in (1, inputs):
            self.fix_statistics(mean or (0.0,), std or (1.0,))
        self._options = size_options(self.model)
        self.remarks: list[str] = built.remarks(self.source)
        if hasattr(self.model.config, MASKED):
            self.remarks.append(
                f"vision.encoder.name: {type(self.model).__name__} reads all patches ({MASKED} = 0), so that one image "
                "has one vector"
            )
        says = f"the image processor of {self.source.text} says"
        if processor.size not in (None, size):
            self.remarks.append(f"vision.augment.size: views are {size} pixels wide, {says} {processor.size}")
        if processor.mean and (mean, std) != (processor.mean, processor.std):
            theirs = f"mean {list(processor.mean)}, std {list(processor.std or ())}"
            self.remarks.append(f"vision.encoder.mean, std: as set, {says} {theirs}")
        outputs = self._try(torch.zeros(1, channels, size, size), processor)
        last = outputs.last_hidden_state
        self._is_sequence = last.ndim == 3
        has_class_token = self._is_sequence and _has_class_token(self.model)
        self.pooling = self._choose_pooling(config.pooling, outputs, has_class_token, built.missing)
        self._of_hidden: Pooling = self.pooling
        if self.pooling == "pooler":
            self._of_hidden = "cls" if has_class_token else "mean"
        self._prefix = _tokens_before_patches(self.model, last, size) if self._is_sequence else 0
        states = tuple(outputs.get("hidden_states") or ())
        if not all(isinstance(each, Tensor) for each in states):
            states = ()
        # timm's ViTs do not return the input of the first layer.
        first = int(len(states) == len(layers(self.model).blocks))
        self.taps = {}
        for number, state in enumerate(states, first):
            width = pooled(state, self._of_hidden, self._prefix).shape[1]
            self.taps[f"layer{number}" if number else "embeddings"] = width
        features = self._features(outputs)
        self.taps["pooled"] = features.shape[1]
        fix_unused(self.model, features)
        self.model.train()
        fine_tune(self.model, config.freeze, config.lora, "vision.encoder")
        sizes = {"width": features.shape[1], "size": size, **parameter_counts(self.model)}
        self.described = {**built.described(self.source), "pooling": self.pooling, **sizes}

    def _try(self, image: Tensor, processor: "Processor") -> Any:
        """Return all outputs for an image, without hidden states if the model has none."""
        self.model.eval()
        with torch.enable_grad():
            outputs = None
            with suppress(Exception):
                outputs = self._run(image, output_hidden_states=True)
            try:
                outputs = outputs or self._run(image)
                if outputs.last_hidden_state.ndim not in (3, 4):
                    raise ValueError(f"its last hidden state has the shape {tuple(outputs.last_hidden_state.shape)}")
            except Exception as error:  # each architecture refuses sizes in its own way
                reason = str(error).strip().partition("\n")[0]
                fix = f"Set vision.augment.size = {processor.size or 'larger'}."
                if processor.size == self._size or isinstance(error, TypeError | AttributeError):
                    fix = "Give an encoder of single images, such as a ViT."
                raise ConfigError(
                    f"vision.encoder.name: {type(self.model).__name__} of {self.source.text!r} cannot read images of "
                    f"{self._size} x {self._size} pixels ({reason}). {fix}"
                ) from error
        return outputs

    def _choose_pooling(
        self, wanted: Pooling | None, outputs: Any, has_class_token: bool, missing: Sequence[str]
    ) -> Pooling:
        possible = {"pooler": outputs.get("pooler_output") is not None, "cls": has_class_token}
        allowed: list[Pooling] = [name for name in get_args(Pooling) if possible.get(name, True)]
        if wanted is not None and wanted not in allowed:
            absent = "pooled output" if wanted == "pooler" else "class token"
            raise ConfigError(
                f"vision.encoder.pooling: {wanted!r} is not possible, {type(self.model).__name__} has no {absent}. "
                f"Allowed: {', '.join(allowed)}."
            )
        pooler_is_random = any(name.partition(".")[0] == "pooler" for name in missing)
        if wanted is None:
            return allowed[1] if pooler_is_random and allowed[0] == "pooler" else allowed[0]
        if wanted == "pooler" and pooler_is_random:
            self.remarks.append("vision.encoder.pooling: the pooler is not among the weights and starts at random")
        return wanted

    def _run(self, images: Tensor, **options: Any) -> Any:
        # Normalising repeats a grey image over the channels of the mean.
        return self.model(pixel_values=self.normalize(images), **self._options, **options)

    def _features(self, outputs: Any) -> Tensor:
        if self.pooling == "pooler":
            return outputs.pooler_output.flatten(1)
        return pooled(outputs.last_hidden_state, self.pooling, self._prefix)

    def forward(self, images: Tensor, tap: str | None = None) -> Tensor:
        if tap in (None, self.last):
            return self._features(self._run(images))
        states = self._run(images, output_hidden_states=True).hidden_states
        return pooled(states[list(self.taps).index(tap)], self._of_hidden, self._prefix)

    @property
    def expression(self) -> str:
        """The features in terms of the model's `outputs`, as code."""
        if self.pooling == "pooler":
            return "outputs.pooler_output.flatten(1)"
        if self.pooling == "cls":
            return "outputs.last_hidden_state[:, 0]"
        function = {"mean": "mean", "max": "amax"}[self.pooling]
        if not self._is_sequence:
            return f"outputs.last_hidden_state.{function}((2, 3))"
        patches = f"[:, {self._prefix}:]" if self._prefix else ""
        return f"outputs.last_hidden_state{patches}.{function}(1)"

    def save_pretrained(self, folder: Path) -> None:
        """Write the model, with adapters merged and its pooling for `read_pooled`, and its image processor."""
        model: Any = merged(self.model)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config[POOLED] = [self.pooling, self._prefix]
        atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
        mean, std = (self.get_buffer(name).tolist() for name in ("mean", "std"))
        write_processor(folder, self._size, len(mean), mean, std)


def _load(source: backbone.NetworkSource, channels: int) -> tuple[backbone.Backbone, int]:
    """Load the model for images of `channels`, and return the number of channels in its configuration."""
    config = backbone.read_config(source, "pixel_values")
    of_timm = getattr(config, "pretrained_cfg", None) or {}
    inputs = int(getattr(config, "num_channels", of_timm.get("input_size", (3,))[0]))
    if channels in (1, inputs):
        return backbone.load(source, "pixel_values", unmasked), inputs
    if channels > inputs or not hasattr(config, "num_channels"):
        raise source.error(
            f"it reads images of {counted(inputs, 'channel')}, these have {channels}. Give a model for "
            f"{counted(channels, 'channel')}"
        )
    built = backbone.load(source, "pixel_values", unmasked)
    narrow(built.model, inputs, channels)
    for part in (built.model.config, *built.model.modules()):
        if hasattr(part, "num_channels"):  # to which it compares its input
            part.num_channels = channels
    return built, inputs


def unmasked(config: Any) -> None:
    if hasattr(config, MASKED):
        setattr(config, MASKED, 0.0)


def _has_class_token(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in CLASS_TOKENS for name, _ in model.named_parameters())


def _tokens_before_patches(model: Any, hidden: Tensor, size: int) -> int:
    """Count the class and register tokens among tokens (n, T, d)."""
    has_class = int(_has_class_token(model))
    patch = getattr(model.config, "patch_size", None)
    if not has_class or patch is None:
        return has_class
    if isinstance(patch, int):
        patch = (patch, patch)
    height, width = (*patch, *patch)[:2]
    return max(has_class, hidden.shape[1] - (size // height) * (size // width))


FILE = "preprocessor_config.json"
BILINEAR = 2  # Pillow's number
CHANNELS = "num_channels"  # of images, in a processor that dipole wrote


def register_exports() -> None:
    """Let transformers build the encoders that dipole exports from dipole's own code. A folder's code is never run."""
    from transformers import AutoConfig, AutoModel

    from dipole.vision.modeling_dipole_vision import DipoleVisionConfig, DipoleVisionModel

    AutoConfig.register(DipoleVisionConfig.model_type, DipoleVisionConfig, exist_ok=True)
    AutoModel.register(DipoleVisionConfig, DipoleVisionModel, exist_ok=True)


@dataclass(frozen=True)
class Processor:
    """Image size in pixels, and mean and standard deviation of each channel in [0, 1], or None where it has none."""

    size: int | None = None
    mean: Statistics | None = None
    std: Statistics | None = None


def processor_of(source: backbone.NetworkSource) -> Processor:
    """Read the image processor of a model."""
    return _read(source, replace(source, weights="random").content)


@cache
def _read(source: backbone.NetworkSource, content: str | None) -> Processor:
    register_exports()
    config = backbone.read_config(source, "pixel_values")
    settings = backbone.image_processor(source)
    if settings:
        return from_settings(settings, source)
    if timm := getattr(config, "pretrained_cfg", None):
        return Processor(int(timm["input_size"][-1]), tuple(timm["mean"]), tuple(timm["std"]))
    return Processor(_side(getattr(config, "image_size", None)))


def from_settings(settings: Mapping[str, Any], source: backbone.NetworkSource) -> Processor:
    """Read preprocessor_config.json, with its rescaling converted to pixels in [0, 1]."""
    settings = settings.get("image_processor", settings)
    cropped = settings.get("do_center_crop", "crop_size" in settings)
    size = _side((cropped and settings.get("crop_size")) or settings.get("size"))
    mean, std = (_numbers(settings.get(name)) for name in ("image_mean", "image_std"))
    if settings.get("do_normalize") is False:
        mean, std = [0.0], [1.0]
    if not mean or not std:
        return Processor(size)
    if not all(each > 0 for each in std):
        raise ConfigError(f"{source.setting}: the image processor of {source.text!r} divides by {std}.")
    scale = 255.0
    if settings.get("do_rescale", True):
        scale *= settings.get("rescale_factor", 1 / 255)
    offset = float(bool(settings.get("rescale_offset")))
    return Processor(size, tuple((each + offset) / scale for each in mean), tuple(each / scale for each in std))


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list | tuple) else [value]
    return [float(each) for each in values if each is not None]


def _side(size: Any) -> int | None:
    """Return the shorter side of a size in any of transformers' spellings."""
    sides = [size]
    if isinstance(size, Mapping):
        sides = [size.get(name) for name in ("shortest_edge", "height", "width")]
    elif isinstance(size, list | tuple):
        sides = list(size[-2:])
    given = [int(side) for side in sides if side]
    return min(given, default=None)


def write_processor(
    folder: Path, size: int, channels: int, mean: list[float] | None = None, std: list[float] | None = None
) -> None:
    """Write an image processor that does the same as evaluation (`decoding.centred_box`), and normalises."""
    settings: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor", "do_convert_rgb": channels == 3, CHANNELS: channels,
        "do_resize": True, "size": {"shortest_edge": size}, "resample": BILINEAR,
        "do_center_crop": True, "crop_size": {"height": size, "width": size},
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": mean is not None,
    }  # fmt: skip
    if mean is not None:
        settings |= {"image_mean": mean, "image_std": std}
    atomic_write(folder / FILE, json.dumps(settings, indent=2) + "\n")
