"""A trained framework with what its exports need."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipole.vision.artifacts import KnownImages
from dipole.vision.config import VisionConfig
from dipole.vision.frameworks.base import Method


@dataclass(frozen=True)
class TrainedModel:
    """A trained framework.

    config: the [vision] table. module: the framework. images: the pretraining images. size: side of the views in
    pixels. info: the record's description of the data. draw: (path, objective, when) writes the picture of a query.
    """

    config: VisionConfig
    module: Method
    images: KnownImages
    size: int
    info: dict[str, Any]
    draw: Callable[[Path, Any, str], None]
