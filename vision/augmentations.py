"""The papers' augmentations for a loop of your own: views of a PIL image, of a tensor, or of a batch on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from dipole.core.objectives.spec import check_whole
from dipole.core.train.recipe import describe
from dipole.core.utils.errors import OptionError, nearest
from dipole.core.utils.pictures import as_rgb, eight_bits, turn_upright
from dipole.core.utils.transfer import constant
from dipole.vision.augment import Augmentation, AugmentConfig

__all__ = ["Augment"]

PresetName = Literal[
    "simclr", "moco", "mocov1", "mocov2", "mocov3", "byol", "simsiam", "nnclr", "swav", "supcon", "cmc", "cacr"
]
Changes = Mapping[str, Any]


def _jitter(brightness: float, saturation: float, hue: float, probability: float = 0.8) -> dict[str, float]:
    strength = {"brightness": brightness, "contrast": brightness, "saturation": saturation, "hue": hue}
    return {"jitter": probability, **strength}


@dataclass(frozen=True)
class Preset:
    """The augmentation of a paper."""

    every: Changes  # of all views, where they differ from those of `AugmentConfig`
    views: tuple[Changes, ...] = ({}, {})  # of the first view, the second view, ... Further views begin again
    small_views: int = 0  # number of small crops


SIMCLR = Preset({"crop_scale": (0.08, 1.0), **_jitter(0.8, 0.8, 0.2), "blur": 0.5})
MOCO = Preset({"crop_scale": (0.2, 1.0), **_jitter(0.4, 0.4, 0.1), "blur": 0.5})
BYOL = Preset({"crop_scale": (0.08, 1.0), **_jitter(0.4, 0.2, 0.1)}, ({"blur": 1.0}, {"blur": 0.1, "solarize": 0.2}))
PRESETS: dict[str, Preset] = {
    **dict.fromkeys(("simclr", "nnclr"), SIMCLR),
    **dict.fromkeys(("moco", "mocov2", "simsiam"), MOCO),
    **dict.fromkeys(("byol", "mocov3"), BYOL),
    "mocov1": Preset({"crop_scale": (0.2, 1.0), **_jitter(0.4, 0.4, 0.4, 1.0)}),
    "swav": Preset({"crop_scale": (0.14, 1.0), **_jitter(0.8, 0.8, 0.2), "blur": 0.5}, small_views=6),
    "supcon": Preset({"crop_scale": (0.2, 1.0), **_jitter(0.4, 0.4, 0.1)}),
    "cmc": Preset({"crop_scale": (0.2, 1.0), "jitter": 0.0, "grey": 0.0}, ({},)),
    "cacr": Preset({}),
}


class Augment:
    """Random views of one image or of a batch, with the settings of a paper.

        >>> augment = Augment("simclr", size=32, blur=0)
        >>> image = PIL.Image.new("RGB", (48, 40))
        >>> [tuple(view.shape) for view in augment(image)]  # in a data set, before a DataLoader
        [(3, 32, 32), (3, 32, 32)]
        >>> [tuple(view.shape) for view in augment(torch.rand(8, 3, 40, 48))]  # a batch, on any device
        [(8, 3, 32, 32), (8, 3, 32, 32)]

    | preset | views | differs from `AugmentConfig` by |
    |---|---|---|
    | `simclr`, `nnclr` (Chen et al. 2020, App. A) | 2 | crops from 8 %, jitter 0.8, 0.8, 0.8, 0.2 in 80 %, blur |
    | `mocov1` (He et al. 2020) | 2 | jitter 0.4 of all four |
    | `mocov2` or `moco`, `simsiam` (Chen et al. 2020; Chen & He 2021) | 2 | jitter 0.4, 0.4, 0.4, 0.1 in 80 %, blur |
    | `byol`, `mocov3` (Grill et al. 2020, Table 6) | 2 | each view has its own blur and solarization |
    | `swav` (Caron et al. 2020) | 2 + 6 | crops from 14 %, and six small ones of 5 to 14 % |
    | `supcon` (Khosla et al. 2020, code for CIFAR) | 2 | that of `moco` without blur |
    | `cmc` (Tian et al. 2020, code) | 1 | crop and flip alone |
    | `cacr` (CACR, Algorithm 1) | 2 | nothing |

    Every image has its own parameters, drawn on the CPU: a seed gives the same views on every device. A PIL image is
    turned upright (EXIF), cropped and resized by Pillow, a tensor by the same bilinear, antialiased rule.

    Args:
        preset: name of a paper's settings, an `AugmentConfig` for two views, or one for each view.
        size: side of the views in pixels, >= 4.
        views: number of views, without small ones. None is the paper's.
        small_views: number of small crops after them. None is the paper's, 6 for "swav".
        small_size: their side in pixels. None is 96/224 of `size`, as in the paper.
        mean: of each channel in [0, 1], subtracted from the views. None: views stay in [0, 1].
        std: of each channel, > 0, by which they are divided then.
        **changes: settings of `AugmentConfig` for all views, such as blur=0 or crop_scale=(0.2, 1.0).

    Raises:
        OptionError: there is no such preset or setting, or a value is out of its range.

    Attributes:
        configs: the settings of each view.
    """

    def __init__(
        self,
        preset: PresetName | AugmentConfig | Sequence[AugmentConfig] = "simclr",
        size: int = 224,
        *,
        views: int | None = None,
        small_views: int | None = None,
        small_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **changes: Any,
    ) -> None:
        check_whole("size", size, 4)
        size = int(size)  # of NumPy as well
        if isinstance(preset, AugmentConfig):
            preset, views = [preset.of_view(number) for number in range(1, (views or 2) + 1)], None
        if isinstance(preset, str):
            self.configs = _of_paper(preset, size, views, small_views, small_size, changes)
        elif not (isinstance(preset, list | tuple) and {type(each) for each in preset} == {AugmentConfig}):
            raise OptionError(f"Augment takes a preset's name, an AugmentConfig or a list of them, not {preset!r}.")
        elif (views, small_views, small_size) != (None, None, None):
            raise OptionError("Augment: each AugmentConfig of a list is a view. Numbers of views are a preset's.")
        else:
            self.configs = [_changed(each.model_dump(), {"size": each.size or size, **changes}) for each in preset]
        self._augmentations = [Augmentation(each) for each in self.configs]
        self._mean_std = None
        if mean is not None or std is not None:
            try:
                self._mean_std = tuple(map(float, mean)), tuple(map(float, std))  # type: ignore[arg-type]
            except (TypeError, ValueError):
                self._mean_std = (), (0.0,)
            if len(self._mean_std[0]) != len(self._mean_std[1]) or not all(each > 0 for each in self._mean_std[1]):
                raise OptionError(
                    "Augment takes mean and std together, one number for each channel, with std > 0, such as "
                    f"mean=(0.5,), std=(0.5,), got mean={mean} and std={std}."
                )

    def __call__(self, images: Image.Image | Tensor, generator: torch.Generator | None = None) -> list[Tensor]:
        """Return a view (C, size, size), or (n, C, size, size) of a batch, for each of `configs`.

        Views are float in [0, 1], or normalised by mean and std.

        Args:
            images: a PIL image, or a tensor (C, H, W) or (n, C, H, W), uint8 or float in [0, 1], on any device.
            generator: on the CPU. None is PyTorch's global one, which a DataLoader seeds for each worker.

        Raises:
            OptionError: it is no image, a float image has values above 1, or `generator` is none.
        """
        if not isinstance(generator, torch.Generator | None):
            raise OptionError(f"Augment: generator must be a torch.Generator or None, got {generator!r}.")
        if isinstance(images, Image.Image):
            views = [self._of_picture(images, each, generator) for each in self._augmentations]
        else:
            _check(images)
            views = [each(images.detach(), generator) for each in self._augmentations]
        return [self._normalized(view) for view in views]

    def _of_picture(self, image: Image.Image, augment: Augmentation, generator: torch.Generator | None) -> Tensor:
        picture = eight_bits(image)
        if picture.mode == "L":
            picture = picture.copy()
        else:
            picture = as_rgb(picture)
        turn_upright(picture)
        size = augment.config.size or min(picture.size)
        parameters, crops = augment.draw_unsized(1, generator, size)
        pixels = augment.cut(picture, crops, size)
        found = torch.from_numpy(pixels.copy().reshape(size, size, -1)).permute(2, 0, 1)
        return augment.apply(found[None], parameters)[0]

    def _normalized(self, view: Tensor) -> Tensor:
        if self._mean_std is None:
            return view
        mean, std = (constant(values, view)[:, None, None] for values in self._mean_std)
        return (view - mean) / std

    def __repr__(self) -> str:
        return f"Augment({self.configs!r})"


def _of_paper(
    name: str, size: int, views: int | None, small_views: int | None, small_size: int | None, changes: Changes
) -> list[AugmentConfig]:
    if name not in PRESETS:
        raise OptionError(f"Augment has no preset {name!r}.{nearest(name, PRESETS)} Presets: {', '.join(PRESETS)}.")
    preset = PRESETS[name]
    count = len(preset.views) if views is None else views
    small = preset.small_views if small_views is None else small_views
    check_whole("views", count)
    check_whole("small_views", small, 0)
    side = max(4, round(size * 96 / 224)) if small_size is None else small_size
    check_whole("small_size", side, 4)
    own = [preset.views[number % len(preset.views)] for number in range(count)]
    large = [_changed({**preset.every, **each, "size": size}, changes) for each in own]
    crops = {"crop_scale": (0.05, 0.14), "blur_kernel": AugmentConfig().kernel(size)}
    return large + [_changed({**preset.every, **changes, "size": int(side)}, crops) for _ in range(small)]


def _changed(settings: Changes, changes: Changes) -> AugmentConfig:
    known = [name for name in AugmentConfig.model_fields if name != "view"]
    for name in changes:
        if name not in known:
            raise OptionError(f"Augment has no setting {name!r}.{nearest(name, known)} Settings: {', '.join(known)}.")
    try:
        return AugmentConfig(**{**settings, **changes})
    except ValidationError as error:
        text = "; ".join(describe(error, AugmentConfig)).replace("the recipe: ", "")
        raise OptionError(f"Augment: {text}") from error


def _check(images: Any) -> None:
    takes = "Augment takes a PIL image, or a tensor (C, H, W) or (n, C, H, W), got "
    if not isinstance(images, Tensor):
        fix = ""
        if isinstance(images, np.ndarray):
            fix = " Make a tensor of an array (H, W, C) by torch.from_numpy(array).permute(2, 0, 1)."
        raise OptionError(f"{takes}{type(images).__name__}.{fix}")
    last = images.ndim - 1
    if images.ndim not in (3, 4) or not images.numel():
        shown = f"a tensor {tuple(images.shape)}"
        raise OptionError(f"{takes}{shown}. An image (H, W) needs image[None], and images (n, H, W) images[:, None].")
    if images.shape[-1] <= 4 < images.shape[-3]:  # as NumPy, OpenCV and imageio have them
        order = ", ".join(map(str, (*range(last - 2), last, last - 2, last - 1)))
        raise OptionError(f"{takes}(..., H, W, C): {tuple(images.shape)}. Use images.permute({order}).")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise OptionError(
            f"Augment takes images as uint8 or float in [0, 1], got {images.dtype}. Divide them by their largest "
            "possible value: images / 255."
        )
    if images.is_cpu and images.is_floating_point():
        low, high = map(float, images.detach().aminmax())
        if high > 1.001 or low < -0.001:
            raise OptionError(
                f"Augment takes float images in [0, 1], and these have values from {low:.4g} to {high:.4g}. Divide 0 "
                "to 255 by 255, and normalise afterwards: Augment(..., mean=MEAN, std=STD)."
            )
