"""Export of a trained run to other libraries: a file per format, found by listing this folder.

FORMAT.py has a function `export(model, folder, record, objective)`, which fills an empty folder and returns the model
card. It is imported when the format is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from dipole.core.utils.extras import needing

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig
    from dipole.vision.frameworks.base import Framework

FORMATS = tuple(sorted(file.name for file in iter_modules(__path__)))


@dataclass(frozen=True)
class TrainedModel:
    """A trained framework."""

    config: "VisionConfig"
    module: "Framework"
    channels: int  # of the images
    size: int  # side of the views in pixels
    info: dict[str, Any]  # the record's description of the data
    draw: Callable[[Path, Any, str], None]  # (path, objective, when) writes the picture of a query


def __getattr__(name: str) -> Any:
    """`from dipole.vision.export import DipoleVisionModel`, without loading the other formats."""
    if name in ("DipoleVisionConfig", "DipoleVisionModel"):
        with needing("vision", f"{__name__}.{name}"):
            return getattr(import_module(f"{__name__}.transformers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
