"""What a trained vision model needs besides its weights: what is known of its images, the classes' names included.

kept/vision.json, encoder/ where the network is one of transformers' by name or folder, and caption/ with the
configuration and the tokenizer of what reads captions
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.received import read_json
from dipole.vision.captions import CaptionBranch
from dipole.vision.config import VisionConfig
from dipole.vision.image_set import ImageSet

HUB = "hub:"  # before the name or folder of a network of transformers


@dataclass(frozen=True)
class KnownImages:
    """What networks, exports and messages ask of the images of pretraining."""

    name: str
    count: int
    channels: int
    height: int
    width: int
    class_names: tuple[str, ...]
    mean: list[float]
    std: list[float]

    @classmethod
    def of(cls, images: ImageSet) -> "KnownImages":
        channels, height, width = images.images.shape[1:]
        return cls(images.name, len(images), channels, height, width, images.class_names, *images.statistics)

    def stand_in(self) -> ImageSet:
        """As many images of this shape, all black; they take the memory of one."""
        one = torch.zeros(1, self.channels, self.height, self.width, dtype=torch.uint8)
        pixels = one.expand(self.count, -1, -1, -1)
        images = ImageSet(self.name, pixels, torch.zeros(self.count, dtype=torch.long), tuple(self.class_names))
        vars(images)["statistics"] = self.mean, self.std
        return images


@dataclass(frozen=True)
class Kept:
    """A folder as `keep` filled it.

    images: as they are known; steps_per_epoch: batches; info: what the record says of the data; encoder: settings of a
    network of transformers that is built from its configuration in this folder; caption: the same of a text model.
    """

    folder: Path
    images: KnownImages
    steps_per_epoch: int
    info: dict[str, Any]
    encoder: dict[str, Any]
    caption: dict[str, Any] = field(default_factory=dict)

    def config(self, config: VisionConfig) -> VisionConfig:
        """The settings of the run, in which networks of transformers are found in this folder."""
        inner, text = self.folder / "encoder", self.folder / "caption"
        if inner.is_dir():
            settings = {"name": f"{HUB}{inner}", **self.encoder}
            config = config.model_copy(update={"encoder": config.encoder.model_copy(update=settings)})
        if text.is_dir() and config.caption is not None:
            settings = {"encoder": f"{HUB}{text}", **self.caption}
            config = config.model_copy(update={"caption": config.caption.model_copy(update=settings)})
        return config


def keep(
    folder: Path, config: VisionConfig, module: nn.Module, images: KnownImages, steps: int, info: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {}
    if config.encoder.name.startswith(HUB):
        encoder: Any = next(part for part in module.modules() if hasattr(part, "model"))
        encoder.model.config.save_pretrained(folder / "encoder")
        # What its default is depends on the weights that there were.
        settings = {"weights": "random", "revision": None, "pooling": encoder.pooling}
    told = {"images": asdict(images), "steps_per_epoch": steps, "info": info, "encoder": settings}
    branch = next((part for part in module.modules() if isinstance(part, CaptionBranch)), None)
    if branch is not None:
        branch.model.config.save_pretrained(folder / "caption")
        branch.tokenizer.save_pretrained(folder / "caption")
        told["caption"] = {
            "weights": "random", "revision": None, "pooling": branch.pooling, "max_length": branch.limit,
        }  # fmt: skip
    (folder / "vision.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> Kept:
    """Read what `keep` wrote; CheckpointError where it is damaged."""
    try:
        told = read_json(folder / "vision.json")
        images = KnownImages(**told["images"])
        return Kept(folder, images, told["steps_per_epoch"], told["info"], told["encoder"], told.get("caption", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the model {folder} is damaged: {error!r}. Train again with --overwrite.") from error
