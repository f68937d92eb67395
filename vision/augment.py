"""Random augmentation with its own parameters for every image, on any device, from one generator.

The operations are those of the contrastive-learning papers (CACR Algorithms 1 and 2, after SimCLR; BYOL Table 6):
random resized crop, horizontal flip, colour jitter, greyscale, Gaussian blur, solarization.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

import numpy as np
import torch
from PIL import Image
from pydantic import Field, create_model, model_validator
from torch import Tensor

from dipole.core.objectives.term_values import without_autocast
from dipole.core.train.config import Settings
from dipole.core.utils.transfer import to_device
from dipole.vision import image_ops
from dipole.vision.decoding import Encoded

CROP_ATTEMPTS = 10
MOST_VIEWS = 16  # of an image, without small crops
CACHE_FLOATS = 1 << 16  # images are processed in slices that stay in the processor's second-level cache
JITTER = (image_ops.adjust_brightness_, image_ops.adjust_contrast_, image_ops.adjust_saturation_, image_ops.adjust_hue_)

Range = tuple[float, float]
Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]


class Operations(Settings):
    """The operations on an image and their probabilities."""

    crop_scale: Range = Field((0.2, 1.0), description="range of the crop's share of the area")
    crop_ratio: Range = Field((3 / 4, 4 / 3), description="range of the crop's width / height")
    flip: Probability = Field(0.5, description="probability of a horizontal flip")
    jitter: Probability = Field(1.0, description="probability of colour jitter")
    brightness: Strength = Field(0.4, description="strength of the jitter's factor of brightness")
    contrast: Strength = Field(0.4, description="strength of the jitter's factor of contrast")
    saturation: Strength = Field(0.4, description="strength of the jitter's factor of saturation")
    hue: float = Field(0.4, ge=0, le=0.5, description="largest shift of the jitter's hue, in turns")
    grey: Probability = Field(0.2, description="probability of greyscale")
    blur: Probability = Field(0.0, description="probability of a Gaussian blur")
    blur_sigma: Range = Field((0.1, 2.0), description="range of its standard deviation in pixels")
    blur_kernel: int | None = Field(None, ge=3, description="its odd width in pixels (default a tenth of the size)")
    solarize: Probability = Field(0.0, description="probability of a solarization, after the blur")
    solarize_threshold: int = Field(128, ge=0, le=256, description="values of 0 to 255 from which it inverts")


def _optional(name: str) -> tuple[Any, Any]:
    """Return the type and default of an operation's setting that may be left out."""
    field = Operations.model_fields[name]
    given: Any = field.annotation | None  # type: ignore[operator]
    for bound in field.metadata:
        given = Annotated[given, bound]
    return given, Field(None, description=field.description)


if TYPE_CHECKING:
    ViewConfig: TypeAlias = Operations
else:
    ViewConfig = create_model(
        "ViewConfig",
        __base__=Settings,
        __module__=__name__,
        __doc__="A [vision.augment.view.N] table: settings that differ for the N-th view.",
        **{name: _optional(name) for name in Operations.model_fields},
    )


class AugmentConfig(Operations):
    """The [vision.augment] table. The defaults are CACR's Algorithm 1 for CIFAR.

    Strengths follow torchvision's ColorJitter: s draws a factor from [max(0, 1 - s), 1 + s], hue h a shift from
    [-h, h] turns.
    """

    size: int | None = Field(
        None, ge=4, description="side of the views in pixels (default that of a hub encoder, else of the images)"
    )
    view: dict[str, ViewConfig] = Field(
        default_factory=dict, description="settings that differ for one view, by number from 1: vision.augment.view.2"
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for number in self.view:
            if not (number.isascii() and number.isdigit() and number[0] != "0"):
                raise ValueError(f"view.{number}: views are numbered from 1, as in [vision.augment.view.2]")
        self._check_ranges("")
        for number in self.view:
            self.of_view(int(number))._check_ranges(f"view.{number}: ")
        return self

    def _check_ranges(self, where: str) -> None:
        for name, top in (("crop_scale", 1.0), ("crop_ratio", math.inf), ("blur_sigma", math.inf)):
            low, high = getattr(self, name)
            if not 0 < low <= high <= top:
                allowed = f"[low, high] with 0 < low <= high <= {top:g}"
                raise ValueError(f"{where}{name} must be {allowed}, got [{low:g}, {high:g}]")
        if self.blur_kernel is not None and self.blur_kernel % 2 == 0:
            raise ValueError(f"{where}blur_kernel must be odd, got {self.blur_kernel}")

    def of_view(self, number: int) -> Self:
        """Return the settings of one view.

        Args:
            number: of the view, from 1.
        """
        if not self.view:
            return self
        own: dict[str, Any] = {}
        if str(number) in self.view:
            own = self.view[str(number)].model_dump(exclude_none=True)
        return self.model_copy(update={"view": {}, **own})

    def kernel(self, size: int) -> int:
        """Return the odd width of the blur in pixels.

        Args:
            size: side of the views in pixels.
        """
        return self.blur_kernel or max(3, size // 10 | 1)


@dataclass(frozen=True)
class Parameters:
    """The random parameters of n images."""

    box: Tensor  # (n, 4) top, left, height, width of the crop in pixels
    flip: Tensor  # (n,) 0 or 1
    brightness: Tensor  # (n,) factor, 1 changes nothing
    contrast: Tensor  # (n,) factor
    saturation: Tensor  # (n,) factor
    hue: Tensor  # (n,) turns
    grey: Tensor  # (n,) 0 or 1
    sigma: Tensor  # (n,) blur in pixels, 0 for none
    solarize: Tensor  # (n,) 0 or 1
    order: tuple[int, ...]  # of the four jitter operations, one for the batch, as in kornia. torchvision: one per image

    def __getitem__(self, index: slice) -> "Parameters":
        return self._map(lambda values: values[index])

    def to(self, device: torch.device) -> "Parameters":
        return self._map(lambda values: to_device(values, device))

    def _map(self, use: Callable[[Tensor], Tensor]) -> "Parameters":
        mapped: dict[str, Any] = {f.name: use(getattr(self, f.name)) for f in fields(self) if f.name != "order"}
        return replace(self, **mapped)


class Augmentation:
    """Random views of one image (C, H, W) or a batch (n, C, H, W). A seed gives the same views on every device."""

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a random view, float in [0, 1], of every image (uint8, or float in [0, 1])."""
        if images.ndim == 3:
            return self(images[None], generator)[0]
        height, width = images.shape[-2:]
        return self.apply(images, self.draw(len(images), height, width, generator))

    def draw(self, n: int, height: int, width: int, generator: torch.Generator | None = None) -> Parameters:
        """Return random parameters of n images of height x width pixels."""
        parameters, crops = self.draw_unsized(n, generator)
        return replace(parameters, box=self.boxes(crops, height, width))

    def draw_unsized(self, n: int, generator: torch.Generator | None, size: int = 0) -> tuple[Parameters, Tensor]:
        """Return parameters of n images, with an image of this size as the box, and numbers (n, k) for `boxes`."""
        config = self.config

        def uniform(low: float, high: float) -> Tensor:
            return torch.empty(n).uniform_(low, high, generator=generator)

        def event(probability: float) -> Tensor:
            return (torch.rand(n, generator=generator) < probability).float()

        jittered = event(config.jitter)
        factors = [
            1 + jittered * (uniform(max(0.0, 1 - strength), 1 + strength) - 1)
            for strength in (config.brightness, config.contrast, config.saturation)
        ]
        low, high = map(math.log, config.crop_ratio)
        area = torch.empty(n, CROP_ATTEMPTS).uniform_(*config.crop_scale, generator=generator)
        log_ratio = torch.empty(n, CROP_ATTEMPTS).uniform_(low, high, generator=generator)
        crops = torch.cat([area, log_ratio, torch.rand(2, n, generator=generator).T], 1)
        parameters = Parameters(
            box=torch.tensor([0.0, 0.0, size, size]).expand(n, 4),
            flip=event(config.flip),
            brightness=factors[0],
            contrast=factors[1],
            saturation=factors[2],
            hue=jittered * uniform(-config.hue, config.hue),
            grey=event(config.grey),
            sigma=event(config.blur) * uniform(*config.blur_sigma),
            order=tuple(torch.randperm(4, generator=generator).tolist()),
            solarize=torch.zeros(n),
        )
        if config.solarize:
            # Drawn last and only if used, so that other settings see the same random numbers with and without it.
            parameters = replace(parameters, solarize=event(config.solarize))
        return parameters, crops

    def boxes(self, crops: Tensor, height: int, width: int) -> Tensor:
        """Return crop boxes (n, 4) in whole pixels: top, left, height, width. crops (n, k): of `draw_unsized`.

        Of ten attempts the first that fits is used, else the largest centred box within the ratios.
        """
        area, log_ratio, place = crops.split([CROP_ATTEMPTS, CROP_ATTEMPTS, 2], 1)
        area, ratio = area * (height * width), log_ratio.exp()
        w = (area * ratio).sqrt().round()
        h = (area / ratio).sqrt().round()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.float().argmax(1, keepdim=True)
        narrow, wide = self.config.crop_ratio
        fallback_h, fallback_w = min(height, round(width / narrow)), min(width, round(height * wide))
        some = fits.any(1)
        h = torch.where(some, h.gather(1, first).squeeze(1), fallback_h)
        w = torch.where(some, w.gather(1, first).squeeze(1), fallback_w)
        top = torch.where(some, (place[:, 0] * (height - h + 1)).floor(), ((height - h) / 2).floor())
        left = torch.where(some, (place[:, 1] * (width - w + 1)).floor(), ((width - w) / 2).floor())
        return torch.stack([top, left, h, w], 1)

    def cut(self, picture: Image.Image, crops: Tensor, size: int) -> np.ndarray:
        """Cut the box of `crops` (1, k) out of a picture, then resize it (bilinear, antialiased)."""
        top, left, height, width = map(int, self.boxes(crops, picture.height, picture.width)[0].tolist())
        part = picture.crop((left, top, left + width, top + height))
        return np.asarray(part.resize((size, size), Image.Resampling.BILINEAR))

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Augment images (n, C, H, W), uint8 or float in [0, 1], to float (n, C, size, size) in [0, 1]."""
        parameters = parameters.to(images.device)
        n, channels, height, width = images.shape
        size = self.config.size or min(height, width)
        out = torch.empty(n, channels, size, size, device=images.device)
        step = max(1, n)
        if images.is_cpu:
            step = max(1, CACHE_FLOATS // max(height * width, size * size))
        with without_autocast(images.device.type):
            for start in range(0, n, step):
                part = slice(start, start + step)
                out[part] = self._apply(size, images[part], parameters[part])
        return out

    def _apply(self, size: int, images: Tensor, p: Parameters) -> Tensor:
        config = self.config
        x = image_ops.resized_crop(image_ops.unit(images), p.box, size, p.flip)
        if config.jitter > 0:
            color_jitter_(x, p)
        if config.grey > 0 and x.shape[1] == 3:
            x.lerp_(image_ops.grey(x), p.grey[:, None, None, None])
        if config.blur > 0:
            x = image_ops.gaussian_blur(x, p.sigma, config.kernel(size))
        if config.solarize > 0:
            x = image_ops.solarize(x, p.solarize, config.solarize_threshold)
        return x


def color_jitter_(images: Tensor, p: Parameters) -> Tensor:
    """Apply brightness, contrast, saturation and hue in the order of `p`, in place, by torchvision's formulas."""
    factors = (p.brightness, p.contrast, p.saturation, p.hue)
    for index in p.order:
        JITTER[index](images, factors[index])
    return images


def random_views(
    images: Tensor | Encoded,
    index: Tensor,
    recipes: Sequence[AugmentConfig],
    generator: torch.Generator,
    device: torch.device,
    mine: slice = slice(None),
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """Return one view (b, C, size, size) in [0, 1] of each image for each recipe. Encoded images are cropped as stored.

    Parameters are drawn for the whole batch (`index`), of which this rank makes the part `mine`.
    """
    augmentations = [Augmentation(each) for each in recipes]
    views = []
    if isinstance(images, Tensor):
        pixels = to_device(images[index[mine]], device)
        height, width = images.shape[-2:]
        for augment in augmentations:
            parameters = augment.draw(len(index), height, width, generator)[mine]
            views.append(augment.apply(pixels, parameters).contiguous(memory_format=layout))
        return views
    sizes = [each.size or images.size for each in recipes]
    drawn = [each.draw_unsized(len(index), generator, size) for each, size in zip(augmentations, sizes, strict=True)]
    crops = [each[mine] for _, each in drawn]

    def cut(place: int, picture: Image.Image) -> list[np.ndarray]:
        own = (each[place : place + 1] for each in crops)
        return [each.cut(picture, draws, size) for each, draws, size in zip(augmentations, own, sizes, strict=True)]

    for augment, pixels, (parameters, _) in zip(augmentations, images.views(index[mine], cut), drawn, strict=True):
        views.append(augment.apply(to_device(pixels, device), parameters[mine]).contiguous(memory_format=layout))
    return views
