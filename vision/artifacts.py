"""The files that a trained vision model needs in addition to its weights.

kept/vision.json describes the images. encoder/ holds the configuration of a model of transformers, caption/ the
configuration and the tokenizer of a text model.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dipole.core.utils.errors import CheckpointError, ReceivedError
from dipole.core.utils.received import read_json
from dipole.vision.captions import CaptionBranch
from dipole.vision.config import VisionConfig
from dipole.vision.encoders.base import PREFIX
from dipole.vision.image_set import ImageSet


@dataclass(frozen=True)
class Artifacts:
    """The content of a folder that `save` wrote."""

    folder: Path
    images: ImageSet  # as many black images of the same shape
    steps_per_epoch: int
    info: dict[str, Any]  # the record's description of the data
    encoder: dict[str, Any]  # settings for building a model of transformers from its configuration in this folder
    caption: dict[str, Any] = field(default_factory=dict)  # the same of a text model

    def config(self, config: VisionConfig) -> VisionConfig:
        """Return the run's settings with models of transformers from this folder."""
        encoder, caption = self.folder / "encoder", self.folder / "caption"
        update: dict[str, Any] = {}
        if encoder.is_dir():
            update["encoder"] = config.encoder.model_copy(update={"name": f"{PREFIX}{encoder}", **self.encoder})
        if caption.is_dir() and config.caption is not None:
            update["caption"] = config.caption.model_copy(update={"encoder": f"{PREFIX}{caption}", **self.caption})
        return config.model_copy(update=update)


def save(
    folder: Path, config: VisionConfig, module: nn.Module, images: ImageSet, steps: int, info: dict[str, Any]
) -> None:
    """Write the files of a trained model into a folder. images: those of pretraining."""
    shape = dict(zip(("count", "channels", "height", "width"), images.images.shape, strict=True))
    mean, std = images.statistics
    known = {"name": images.name, **shape, "class_names": images.class_names, "mean": mean, "std": std}
    content: dict[str, Any] = {"images": known, "steps_per_epoch": steps, "info": info, "encoder": {}}
    # Defaults that depended on the pretrained weights are written out.
    built = {"weights": "random", "revision": None}
    if config.encoder.is_hub:
        encoder: Any = next(part for part in module.modules() if hasattr(part, "model"))
        encoder.model.config.save_pretrained(folder / "encoder")
        content["encoder"] = {**built, "pooling": encoder.pooling}
    branch = next((part for part in module.modules() if isinstance(part, CaptionBranch)), None)
    if branch is not None:
        branch.model.config.save_pretrained(folder / "caption")
        branch.tokenizer.save_pretrained(folder / "caption")
        content["caption"] = {**built, "pooling": branch.pooling, "max_length": branch.limit}
    (folder / "vision.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> Artifacts:
    """Read what `save` wrote. Raise CheckpointError if it is damaged."""
    try:
        content = read_json(folder / "vision.json")
        return Artifacts(folder, _stand_in(**content.pop("images")), **content)
    except ReceivedError as error:
        problem = str(error).rstrip(".")
        raise CheckpointError(f"the model is damaged: {problem}. Train again with --overwrite.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the model {folder} is damaged: {error!r}. Train again with --overwrite.") from error


def _stand_in(name: str, class_names: list[str], mean: list[float], std: list[float], **shape: int) -> ImageSet:
    """Return as many black images of a shape, in the memory of one."""
    count, *one = (shape[side] for side in ("count", "channels", "height", "width"))
    pixels = torch.zeros(1, *one, dtype=torch.uint8).expand(count, -1, -1, -1)
    images = ImageSet(name, pixels, torch.zeros(count, dtype=torch.long), tuple(class_names))
    vars(images)["statistics"] = mean, std
    return images
