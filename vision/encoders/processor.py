"""What the image processor of a model says of the images it wants: side in pixels, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from dipole.core.utils import backbone
from dipole.core.utils.errors import ConfigError

if TYPE_CHECKING:
    from dipole.vision.encoders import EncoderConfig

Statistics = tuple[float, ...]


@dataclass(frozen=True)
class Processor:
    """Side of the images, and the statistics of every channel in [0, 1] that they are normalised by; None: not said.

    overridden: what it says where a recipe says something else.
    """

    size: int | None = None
    mean: Statistics | None = None
    std: Statistics | None = None
    overridden: str | None = None


def processor_of(config: EncoderConfig) -> Processor:
    """The image processor of a [vision.encoder] table's model, with what the table sets itself."""
    source = config.source
    said = _read(source, replace(source, weights="random").content)
    if config.mean is None and config.std is None:
        return said
    mean, std = config.mean or said.mean or (0.0,), config.std or said.std or (1.0,)
    differs = said.mean is not None and (mean, std) != (said.mean, said.std)
    overridden = f"mean {list(said.mean or ())}, std {list(said.std or ())}" if differs else None
    return replace(said, mean=mean, std=std, overridden=overridden)


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
    """Read preprocessor_config.json: pixels are divided by 255 here, and by what it says there."""
    settings = settings.get("image_processor", settings)
    cropped = settings.get("do_center_crop", "crop_size" in settings)
    size = _side((cropped and settings.get("crop_size")) or settings.get("size"))
    if settings.get("do_normalize") is False:
        mean, std = [0.0], [1.0]
    else:
        mean, std = (_listed(settings.get(name)) for name in ("image_mean", "image_std"))
    if not mean or not std:
        return Processor(size)
    if not all(each > 0 for each in std):
        raise ConfigError(f"{source.setting}: the image processor of {source.text!r} divides by {std}.")
    scale = 255 * settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 255.0
    offset = 1.0 if settings.get("rescale_offset") else 0.0
    return Processor(size, tuple((each + offset) / scale for each in mean), tuple(each / scale for each in std))


def _listed(value: Any) -> list[float]:
    return [] if value is None else [float(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _side(size: Any) -> int | None:
    """The shorter side of a size in any of the library's spellings."""
    if isinstance(size, Mapping):
        sides = [size[name] for name in ("shortest_edge", "height", "width") if size.get(name)]
        return int(min(sides)) if sides else None
    if isinstance(size, list | tuple):
        return int(min(size[-2:])) if size else None
    return int(size) if size else None
