"""Image models of the transformers library: ResNet, ViT, DINOv2, ConvNeXt, Swin, timm's through its wrapper, others."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dipole.core.train.finetuning import fine_tune
from dipole.core.utils import backbone
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import atomic_write
from dipole.core.utils.freezing import fix_unused, layers
from dipole.core.utils.lora import merged
from dipole.core.utils.text import counted
from dipole.vision.encoders.base import Encoder, register_encoder
from dipole.vision.encoders.processor import Processor, processor_of
from dipole.vision.processor import write_processor

if TYPE_CHECKING:
    from dipole.vision.encoders import EncoderConfig

Pooling = Literal["cls", "mean", "max", "pooler"]
PREFIX = "hub:"
POOLED = "dipole_pooling"  # in the config.json of an exported model: how its run pools, and tokens before the patches
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")


@register_encoder("hub:ID-or-folder")
def hub(channels: int, size: int, config: EncoderConfig, share: float) -> Encoder:
    """Any image model of transformers, from a folder or the Hub, with its weights or from its configuration."""
    if share != 1:
        raise ConfigError(
            f"vision.encoder.name: {config.name!r} is as wide as its configuration says, and cannot be built with a "
            f"share of {share:g} of it; set vision.cmc.width = 1.0."
        )
    return HubEncoder(channels, size, config)


def pooled(hidden: Tensor, how: Pooling, prefix: int) -> Tensor:
    """One vector per image of tokens (n, T, d), `prefix` of them no patches, or of maps (n, d, H, W)."""
    if hidden.ndim == 4:
        return hidden.mean((2, 3)) if how == "mean" else hidden.amax((2, 3))
    if how == "cls":
        return hidden[:, 0]
    patches = hidden[:, prefix:]
    return patches.mean(1) if how == "mean" else patches.amax(1)


def read_pooled(model: Any, pixel_values: Tensor) -> Tensor:
    """Features (n, d) of a model of transformers: as config.json says that a run pools, else by pooler or mean."""
    outputs = model(pixel_values=pixel_values, **any_size(model))
    how, prefix = getattr(model.config, POOLED, (None, 0))
    given = outputs.get("pooler_output")
    if how == "pooler" or (how is None and given is not None):
        return given.flatten(1)
    return pooled(outputs.last_hidden_state, how or "mean", prefix)


def any_size(model: nn.Module) -> dict[str, Any]:
    """What a model is called with that has a position for each patch: positions for another number of patches."""
    accepted = inspect.signature(model.forward).parameters
    return {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in accepted else {}


class HubEncoder(Encoder):
    """A model of transformers that reads `pixel_values`, and how its output is pooled.

    Grey images are repeated over the model's channels, as a conversion to RGB does. Where a framework splits colour
    images, the first layer is rebuilt for so many channels: each gets an equal share of the sum of its weights.

    Taps: "embeddings", "layer1", ... are the model's hidden states, pooled alike ("pooler": by mean, or by the class
    token where there is one); "pooled" is what is trained.
    """

    last_tap: ClassVar[str] = "pooled"

    def __init__(self, channels: int, size: int, config: EncoderConfig) -> None:
        self.source, self._size = config.source, size
        processor = processor_of(config)
        built, inputs = _built(self.source, channels)
        super().__init__(inputs if channels == 1 else channels)
        self.model = built.model
        if processor.mean is not None and channels in (1, inputs):
            self.fix_statistics(processor.mean, processor.std or (1.0,))
        self._options = any_size(self.model)
        self._look(channels, size, config, processor, built)
        fine_tune(self.model, config.freeze, config.lora, "vision.encoder")
        self.described = self._described(built, size, config)

    def _look(
        self, channels: int, size: int, config: EncoderConfig, processor: Processor, built: backbone.Backbone
    ) -> None:
        """See from one grey image what the model gives: which poolings there are, how wide it is, what it leaves."""
        self.model.eval()
        try:
            with torch.enable_grad():
                found = self._first(torch.zeros(1, channels, size, size))
        except Exception as error:  # each architecture refuses sizes in its own way
            native = f"{processor.size}" if processor.size else "larger"
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"vision.encoder.name: {type(self.model).__name__} of {self.source.text!r} cannot read images of "
                f"{size} x {size} pixels ({reason}). Set vision.augment.size = {native}."
            ) from error
        states = tuple(found.get("hidden_states") or ())
        last = found.last_hidden_state
        possible: dict[Pooling, bool] = {
            "pooler": found.get("pooler_output") is not None,
            "cls": last.ndim == 3 and _has_class_token(self.model),
            "mean": True,
            "max": True,
        }
        allowed = [how for how, is_there in possible.items() if is_there]
        pooler_is_random = any(name.partition(".")[0] == "pooler" for name in built.missing)
        if config.pooling is not None and config.pooling not in allowed:
            gives = "no pooled output" if config.pooling == "pooler" else "no class token"
            raise ConfigError(
                f"vision.encoder.pooling: {config.pooling!r} is not possible, {type(self.model).__name__} has {gives}. "
                f"Allowed: {', '.join(allowed)}."
            )
        # A head that no file had the weights of is no default.
        self.pooling: Pooling = config.pooling or allowed[1 if allowed[0] == "pooler" and pooler_is_random else 0]
        self._of_hidden: Pooling = self.pooling if self.pooling != "pooler" else "cls" if possible["cls"] else "mean"
        self._is_sequence = last.ndim == 3
        self._prefix = _tokens_before(self.model, last, size) if self._is_sequence else 0
        # timm's ViTs do not give what goes into the first layer.
        first = int(len(states) == len(layers(self.model).blocks))
        names = [f"layer{n}" if n else "embeddings" for n in range(first, first + len(states))]
        widths = {name: self._pool(state).shape[1] for name, state in zip(names, states, strict=True)}
        features = self._features(found)
        self.taps = widths | {self.last_tap: features.shape[1]}
        fix_unused(self.model, features)
        self.model.train()
        self.remarks = [*built.remarks(self.source), *self._remarks(size, config, processor)]
        if pooler_is_random and self.pooling == "pooler":
            self.remarks.append("vision.encoder.pooling: the pooler is not among the weights and starts at random")

    def _remarks(self, size: int, config: EncoderConfig, processor: Processor) -> list[str]:
        lines = []
        if processor.size is not None and processor.size != size:
            lines.append(
                f"vision.augment.size: views are {size} pixels wide, the image processor of {self.source.text} says "
                f"{processor.size}"
            )
        if processor.overridden is not None:
            lines.append(
                f"vision.encoder.mean, std: as set, the image processor of {self.source.text} says "
                f"{processor.overridden}"
            )
        return lines

    def _described(self, built: backbone.Backbone, size: int, config: EncoderConfig) -> dict[str, Any]:
        parameters = list(self.model.parameters())
        return {
            **built.described(self.source),
            "pooling": self.pooling,
            "width": self.taps[self.last_tap],
            "size": size,
            "parameters": sum(each.numel() for each in parameters),
            "frozen": sum(each.numel() for each in parameters if not each.requires_grad),
        }

    def _first(self, image: Tensor) -> Any:
        """All that the model gives; without hidden states where it has none."""
        try:
            return self._run(image, hidden=True)
        except Exception:
            return self._run(image)

    def _run(self, images: Tensor, hidden: bool = False) -> Any:
        x = self.normalize(images)  # a grey image takes on the channels of the mean
        options = self._options | ({"output_hidden_states": True} if hidden else {})
        return self.model(pixel_values=x, **options)

    def _pool(self, hidden: Tensor) -> Tensor:
        return pooled(hidden, self._of_hidden if hidden.ndim == 3 or self._of_hidden == "max" else "mean", self._prefix)

    def _features(self, outputs: Any) -> Tensor:
        if self.pooling == "pooler":
            found: Tensor = outputs.pooler_output.flatten(1)
            return found
        return pooled(outputs.last_hidden_state, self.pooling, self._prefix)

    def forward(self, images: Tensor, tap: str | None = None) -> Tensor:
        if tap is None or tap == self.last_tap:
            return self._features(self._run(images))
        place = list(self.taps).index(tap)
        return self._pool(self._run(images, hidden=True).hidden_states[place])

    @property
    def expression(self) -> str:
        """The features in terms of the model's `outputs`, as code."""
        if self.pooling == "pooler":
            return "outputs.pooler_output.flatten(1)"
        if self.pooling == "cls":
            return "outputs.last_hidden_state[:, 0]"
        rows, axes = (f"[:, {self._prefix}:]" if self._prefix else "", "1") if self._is_sequence else ("", "(2, 3)")
        return f"outputs.last_hidden_state{rows}.{'mean' if self.pooling == 'mean' else 'amax'}({axes})"

    def save_pretrained(self, folder: Path) -> None:
        """Write the model and the settings of its image processor as `AutoModel.from_pretrained` reads them.

        Adapters are added to the weights they stand beside. How the run pools stands in config.json, for `read_pooled`.
        """
        model: Any = merged(self.model)
        model.save_pretrained(folder)
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        told[POOLED] = [self.pooling, self._prefix]
        atomic_write(folder / "config.json", json.dumps(told, indent=2) + "\n")
        mean, std = (self.get_buffer(name).tolist() for name in ("mean", "std"))
        write_processor(folder, self._size, len(mean), mean, std)


def _built(source: backbone.Source, channels: int) -> tuple[backbone.Backbone, int]:
    """The model for so many channels, and how many its configuration says."""
    config = backbone.read_config(source, "pixel_values")
    inputs = _channels(config)
    if channels in (1, inputs):
        return backbone.load(source, "pixel_values"), inputs
    if channels > inputs or not hasattr(config, "num_channels"):
        raise source.error(
            f"it reads images of {counted(inputs, 'channel')}, these have {channels}; give a model for "
            f"{counted(channels, 'channel')}"
        )
    built = backbone.load(source, "pixel_values")

    def fewer(config: Any) -> None:
        config.num_channels = channels

    narrow = backbone.load(replace(source, weights="random"), "pixel_values", fewer)
    if built.pretrained and torch.get_default_device().type != "meta":
        narrow.model.load_state_dict(_shared_out(built.model.state_dict(), narrow.model.state_dict()))
    built.model = narrow.model
    return built, inputs


def _channels(config: Any) -> int:
    if hasattr(config, "num_channels"):
        return int(config.num_channels)
    return int((getattr(config, "pretrained_cfg", None) or {}).get("input_size", (3,))[0])


def _shared_out(weights: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, but that each channel of the first layer has an equal share of the sum over its channels."""

    def fit(name: str, weight: Tensor) -> Tensor:
        shape = like[name].shape
        return weight if weight.shape == shape else (weight.sum(1, keepdim=True) / shape[1]).expand(shape).clone()

    return {name: fit(name, weight) for name, weight in weights.items()}


def _has_class_token(model: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in CLASS_TOKENS for name, _ in model.named_parameters())


def _tokens_before(model: Any, hidden: Tensor, size: int) -> int:
    """How many of the tokens (n, T, d) are no patches: class and register tokens."""
    patch = getattr(model.config, "patch_size", None)
    has_class = int(_has_class_token(model))
    if not has_class or patch is None:
        return has_class
    height, width = (patch, patch) if isinstance(patch, int) else (*patch, *patch)[:2]
    before = hidden.shape[1] - (size // height) * (size // width)
    return before if before >= has_class else has_class
