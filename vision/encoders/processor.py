"""Image processors of transformers: read the settings of one, and write one for an exported encoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dipole.core.utils import backbone
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import atomic_write
from dipole.vision.encoders.base import EncoderSettings, Statistics

FILE = "preprocessor_config.json"
BILINEAR = 2  # Pillow's number


@dataclass(frozen=True)
class Processor:
    """Image size in pixels, and mean and standard deviation of each channel in [0, 1]; None where it has none.

    overridden: the processor's statistics, where a recipe sets others.
    """

    size: int | None = None
    mean: Statistics | None = None
    std: Statistics | None = None
    overridden: str | None = None


def processor_of(config: EncoderSettings) -> Processor:
    """Read the image processor of a [vision.encoder] table's model; the table's own statistics win."""
    source = config.source
    read = _read(source, replace(source, weights="random").content)
    if config.mean is None and config.std is None:
        return read
    mean, std = config.mean or read.mean or (0.0,), config.std or read.std or (1.0,)
    overridden = None
    if read.mean is not None and (mean, std) != (read.mean, read.std):
        overridden = f"mean {list(read.mean)}, std {list(read.std or ())}"
    return replace(read, mean=mean, std=std, overridden=overridden)


@cache
def _read(source: backbone.Source, content: str | None) -> Processor:
    config = backbone.read_config(source, "pixel_values")
    settings = backbone.image_processor(source)
    if settings:
        return from_settings(settings, source)
    if timm := getattr(config, "pretrained_cfg", None):
        return Processor(int(timm["input_size"][-1]), tuple(timm["mean"]), tuple(timm["std"]))
    return Processor(_side(getattr(config, "image_size", None)))


def from_settings(settings: Mapping[str, Any], source: backbone.Source) -> Processor:
    """Read preprocessor_config.json; its rescaling is converted to pixels in [0, 1]."""
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
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return list(map(float, value))
    return [float(value)]


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
    """Write an image processor: resize the shorter side, crop the centred square, divide by 255, normalise.

    `dipole embed RUN` does the same to images that are not square (`inference.upright_view`). Without mean and std it
    does not normalise.
    """
    settings: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": mean is not None,
        "do_convert_rgb": channels == 3,
    }
    if mean is not None:
        settings |= {"image_mean": mean, "image_std": std}
    atomic_write(folder / FILE, json.dumps(settings, indent=2) + "\n")
