"""Random image augmentation for whole batches: own parameters for every image, on any device, from one generator.

The operations are those of the contrastive-learning papers (CACR Algorithms 1 and 2, after SimCLR; BYOL Table 6):
random resized crop, horizontal flip, colour jitter, greyscale, Gaussian blur, solarization. `draw` samples the
parameters on the CPU, so a seed gives the same augmentation on every device; `apply` is deterministic given the
parameters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

import torch
from pydantic import Field, create_model, model_validator
from torch import Tensor

from dipole.core.train.config import Settings
from dipole.core.utils.transfer import constant, to_device

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, the greyscale weights of Pillow and torchvision
CROP_ATTEMPTS = 10
CACHE_FLOATS = 1 << 16  # images are processed in slices whose planes stay in the processor's second-level cache


Range = tuple[float, float]
Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0)]


class Operations(Settings):
    """What may happen to an image, and how likely it is."""

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
    blur_kernel: int | None = Field(None, ge=3, description="its odd width in pixels; default: a tenth of the size")
    solarize: Probability = Field(0.0, description="probability of a solarization, behind the blur")
    solarize_threshold: int = Field(128, ge=0, le=256, description="values of 0 to 255 from which it inverts")


def _optional(name: str) -> tuple[Any, Any]:
    """The type and default of a setting that may be left out."""
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
        __doc__="A [vision.augment.view.N] table: what is otherwise for the N-th view.",
        **{name: _optional(name) for name in Operations.model_fields},
    )


class AugmentConfig(Operations):
    """The [vision.augment] table: what may happen to an image. The defaults are CACR's Algorithm 1 for CIFAR.

    Strengths follow torchvision's ColorJitter: s draws a factor from [max(0, 1 - s), 1 + s], hue h a shift from
    [-h, h] turns.
    """

    size: int | None = Field(
        None,
        ge=4,
        description="side of the views in pixels; default: as a hub encoder's processor says, else the images' own",
    )
    view: dict[str, ViewConfig] = Field(
        default_factory=dict, description="by number from 1, such as vision.augment.view.2: what is otherwise there"
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = [number for number in self.view if not (number.isascii() and number.isdigit() and number[0] != "0")]
        if wrong:
            raise ValueError(f"view.{wrong[0]}: views are numbered from 1, as in [vision.augment.view.2]")
        for where, each in {
            "": self,
            **{f"view.{number}: ": self.of_view(int(number)) for number in self.view},
        }.items():
            for name, top in (("crop_scale", 1.0), ("crop_ratio", math.inf), ("blur_sigma", math.inf)):
                low, high = getattr(each, name)
                if not 0 < low <= high <= top:
                    allowed = f"[low, high] with 0 < low <= high <= {top:g}"
                    raise ValueError(f"{where}{name} must be {allowed}, got [{low:g}, {high:g}]")
            if each.blur_kernel is not None and each.blur_kernel % 2 == 0:
                raise ValueError(f"{where}blur_kernel must be odd, got {each.blur_kernel}")
        return self

    def of_view(self, number: int) -> Self:
        """What happens to one view: this table, and what its own says otherwise.

        Args:
            number: of the view, from 1.
        """
        own = self.view.get(str(number))
        told: dict[str, Any] = {} if own is None else own.model_dump(exclude_none=True)
        return self.model_copy(update={"view": {}, **told}) if self.view else self

    def kernel(self, size: int) -> int:
        """Width of the blur in pixels, odd.

        Args:
            size: side of the views in pixels.
        """
        return self.blur_kernel or max(3, size // 10 | 1)


@dataclass(frozen=True)
class Parameters:
    """What happens to each of n images, drawn by `draw`.

    box (n, 4): top, left, height, width of the crop in pixels. flip, grey (n,): 0 or 1. brightness, contrast,
    saturation (n,): factors, 1 changes nothing. hue (n,): turns. sigma (n,): blur in pixels, 0 for none.
    solarize (n,): 0 or 1.
    order: in which the four jitter operations are applied, one for the call (as kornia; torchvision: one per image).
    """

    box: Tensor
    flip: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor
    grey: Tensor
    sigma: Tensor
    solarize: Tensor
    order: tuple[int, ...]

    def __getitem__(self, index: slice) -> "Parameters":
        return Parameters(
            **{f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "order"}, order=self.order
        )

    def to(self, device: torch.device) -> "Parameters":
        if self.box.device == device:
            return self
        names = [f.name for f in fields(self) if f.name not in ("box", "order")]
        packed = torch.cat([self.box, torch.stack([getattr(self, name) for name in names], 1)], 1)  # one copy for all
        box, *columns = to_device(packed, device).split([4] + [1] * len(names), 1)
        return Parameters(box=box, **dict(zip(names, (each[:, 0] for each in columns), strict=True)), order=self.order)


@dataclass(frozen=True)
class Chances:
    """What decides the crop of each of n images, whatever its size.

    area, log_ratio (n, attempts): shares of the image's area and logarithms of width / height, in the order in which
    they are tried. place (2, n): of the box that fits, from 0 (top, left) to 1.
    """

    area: Tensor
    log_ratio: Tensor
    place: Tensor

    def __getitem__(self, index: slice) -> "Chances":
        return Chances(self.area[index], self.log_ratio[index], self.place[:, index])


def draw(config: AugmentConfig, n: int, height: int, width: int, generator: torch.Generator) -> Parameters:
    """Sample the parameters of n images of height x width pixels."""
    parameters, chances = draw_cropped(config, n, generator)
    return replace(parameters, box=boxes(config, chances, height, width))


def draw_cropped(
    config: AugmentConfig, n: int, generator: torch.Generator, size: int = 0
) -> tuple[Parameters, Chances]:
    """Sample the parameters of n images of any sizes: what decides their crops, and what happens to crops of `size`."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n).uniform_(low, high, generator=generator)

    def event(probability: float) -> Tensor:
        return (torch.rand(n, generator=generator) < probability).float()

    jittered = event(config.jitter)
    factors = [
        1 + jittered * (uniform(max(0.0, 1 - strength), 1 + strength) - 1)
        for strength in (config.brightness, config.contrast, config.saturation)
    ]
    chances = draw_chances(config, n, generator)
    return Parameters(
        box=torch.tensor([0.0, 0.0, size, size]).expand(n, 4),
        flip=event(config.flip),
        brightness=factors[0],
        contrast=factors[1],
        saturation=factors[2],
        hue=jittered * uniform(-config.hue, config.hue),
        grey=event(config.grey),
        sigma=event(config.blur) * uniform(*config.blur_sigma),
        order=tuple(torch.randperm(4, generator=generator).tolist()),
        # Last, and only where it is asked for: what else is drawn stays what it was before there was such a thing.
        solarize=event(config.solarize) if config.solarize else torch.zeros(n),
    ), chances


def draw_chances(config: AugmentConfig, n: int, generator: torch.Generator) -> Chances:
    """Sample what decides n crops: area uniform in `crop_scale`, log aspect uniform in `crop_ratio`, ten attempts."""
    area = torch.empty(n, CROP_ATTEMPTS).uniform_(*config.crop_scale, generator=generator)
    log_ratio = torch.empty(n, CROP_ATTEMPTS).uniform_(*map(math.log, config.crop_ratio), generator=generator)
    return Chances(area, log_ratio, torch.rand(2, n, generator=generator))


def draw_boxes(config: AugmentConfig, n: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Sample n crop boxes (n, 4) of images of height x width pixels."""
    return boxes(config, draw_chances(config, n, generator), height, width)


def boxes(config: AugmentConfig, chances: Chances, height: int, width: int) -> Tensor:
    """Crop boxes (n, 4) in whole pixels: top, left, height, width.

    The first attempt that fits is taken; where none fits, the largest centred box within the ratios.
    """
    area, ratio, place = chances.area * (height * width), chances.log_ratio.exp(), chances.place
    w = (area * ratio).sqrt().round()
    h = (area / ratio).sqrt().round()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.float().argmax(1, keepdim=True)  # of equal values the first
    fallback_h, fallback_w = whole_box(height, width, config.crop_ratio)
    some = fits.any(1)
    h = torch.where(some, h.gather(1, first).squeeze(1), fallback_h)
    w = torch.where(some, w.gather(1, first).squeeze(1), fallback_w)
    top = torch.where(some, (place[0] * (height - h + 1)).floor(), ((height - h) / 2).floor())
    left = torch.where(some, (place[1] * (width - w + 1)).floor(), ((width - w) / 2).floor())
    return torch.stack([top, left, h, w], 1)


def whole_box(height: int, width: int, ratio: tuple[float, float]) -> tuple[float, float]:
    """Height and width of the largest box of a height x width image whose aspect lies within `ratio`."""
    if width / height < ratio[0]:
        return float(min(height, round(width / ratio[0]))), float(width)
    if width / height > ratio[1]:
        return float(height), float(min(width, round(height * ratio[1])))
    return float(height), float(width)


def resampling(start: Tensor, extent: Tensor, source: int, target: int, mirror: Tensor | None = None) -> Tensor:
    """Matrices (n, target, source) that resample `extent` pixels from `start` to `target` pixels along one axis.

    Bilinear with antialiasing when shrinking (the triangle widens with the scale), half-pixel centres, nothing outside
    the crop is read: Pillow's and torchvision's `resize(antialias=True)`. mirror (n,): 1 reverses the output.
    """
    position = torch.arange(target, device=start.device, dtype=torch.float32) + 0.5
    scale = (extent / target)[:, None]
    if mirror is not None:
        position = position + mirror[:, None] * (target - 2 * position)
    centre = (start[:, None] - 0.5 + position * scale)[:, :, None]
    pixel = torch.arange(source, device=start.device, dtype=torch.float32)
    weight = (pixel - centre).abs_().div_(scale.clamp_min(1)[:, :, None]).neg_().add_(1).clamp_min_(0)
    low, high = start[:, None, None], (start + extent)[:, None, None]
    inside = (pixel - low + 1).clamp_(0, 1) * (high - pixel).clamp_(0, 1)
    weight *= inside
    return weight.div_(weight.sum(2, keepdim=True))


def resized_crop(images: Tensor, box: Tensor, size: int, flip: Tensor | None = None) -> Tensor:
    """Crop every image (n, C, H, W) to its box (n, 4), resize it to size x size and mirror it where flip (n,) is 1."""
    n, channels, height, width = images.shape
    across = resampling(box[:, 1], box[:, 3], width, size, flip)
    down = resampling(box[:, 0], box[:, 2], height, size)
    rows = torch.bmm(images.reshape(n, channels * height, width), across.mT)
    return torch.matmul(down[:, None], rows.view(n, channels, height, size))


def grey(images: Tensor) -> Tensor:
    """Luma (n, 1, H, W) of RGB images (n, 3, H, W); one-channel images are their own."""
    if images.shape[1] == 1:
        return images
    r, g, b = images.unbind(1)
    return (r * LUMA[0]).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2]).unsqueeze_(1)


def adjust_brightness_(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply (n, C, H, W) by factor (n,), in place, clamped to [0, 1]."""
    return images.mul_(factor[:, None, None, None]).clamp_(0, 1)


def adjust_contrast_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend every image with its mean luma: factor x + (1 - factor) mean, in place, clamped to [0, 1]."""
    mean = images.mean((2, 3))
    if images.shape[1] == 3:
        mean = (mean * constant(LUMA, mean)).sum(1, keepdim=True)
    offset = (1 - factor[:, None]) * mean
    return images.mul_(factor[:, None, None, None]).add_(offset[:, :, None, None]).clamp_(0, 1)


def adjust_saturation_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend every pixel with its luma: factor x + (1 - factor) grey(x), in place, clamped to [0, 1]."""
    if images.shape[1] != 3:
        return images
    factor = factor[:, None, None, None]
    luma = grey(images).mul_(1 - factor)
    return images.mul_(factor).add_(luma).clamp_(0, 1)


def adjust_hue_(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of (n, 3, H, W) by turns (n,) in [-0.5, 0.5] at constant HSV saturation and value, in place."""
    if images.shape[1] != 3:
        return images
    r, g, b = images.unbind(1)
    low = torch.minimum(r, g)
    chroma = torch.maximum(r, g)
    torch.minimum(low, b, out=low)
    torch.maximum(chroma, b, out=chroma)
    chroma -= low
    # With channels scaled to u, v, w in [0, 1], the hue in sixths of a turn is 1 - u + v + w on the half circle where
    # g >= b and its negative on the other: no case distinction per sextant is needed.
    hue = (g + b).sub_(r).sub_(low).div_(chroma.clamp_min(1e-12)).add_(1)
    hue.copysign_(g - b).add_(turns[:, None, None] * 6)
    hue.sub_((hue / 6).round_().mul_(6))
    for channel, offset in ((r, 0.0), (g, -2.0), (b, 2.0)):
        # distance from the channel's own hue around the circle, in sixths: 0..3
        level = (hue + offset).abs_().sub_(3).abs_().sub_(1).clamp_(0, 1)
        torch.addcmul(low, chroma, level, out=channel)
    return images


JITTER = (adjust_brightness_, adjust_contrast_, adjust_saturation_, adjust_hue_)


def color_jitter_(images: Tensor, p: Parameters) -> Tensor:
    """Brightness, contrast, saturation and hue in the order of `p`, in place; torchvision's formulas."""
    factors = (p.brightness, p.contrast, p.saturation, p.hue)
    for index in p.order:
        JITTER[index](images, factors[index])
    return images


def blurring(sigma: Tensor, size: int, kernel: int) -> Tensor:
    """Matrices (n, size, size) that convolve one axis with a Gaussian of sigma (n,) pixels, cut to `kernel` taps.

    The border is reflected without repeating the edge pixel; sigma 0 gives the identity.
    """
    taps = torch.arange(kernel, device=sigma.device) - kernel // 2
    weight = torch.exp(-0.5 * (taps / sigma.clamp_min(1e-3)[:, None]) ** 2)
    weight = weight / weight.sum(1, keepdim=True)
    source = (torch.arange(size, device=sigma.device)[:, None] + taps).abs()  # (size, kernel)
    source = (size - 1) - ((size - 1) - source).abs()
    matrix = weight.new_zeros(len(sigma), size, size)
    return matrix.scatter_add_(2, source.expand(len(sigma), -1, -1), weight[:, None].expand(-1, size, -1).contiguous())


def gaussian_blur(images: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Blur every image (n, C, H, W) with its own sigma (n,), separably; H and W must exceed kernel / 2."""
    n, channels, height, width = images.shape
    across = blurring(sigma, width, kernel)
    down = across if height == width else blurring(sigma, height, kernel)
    rows = torch.bmm(images.reshape(n, channels * height, width), across.mT)
    return torch.matmul(down[:, None], rows.view(n, channels, height, width))


def solarized(images: Tensor, where: Tensor, threshold: int) -> Tensor:
    """Invert the values (n, C, H, W) from `threshold` / 255 on, in the images where `where` (n,) is 1: Pillow's."""
    chosen = (images >= threshold / 255) & (where > 0)[:, None, None, None]
    return torch.where(chosen, 1 - images, images)


def apply(config: AugmentConfig, images: Tensor, parameters: Parameters) -> Tensor:
    """Augment images (n, C, H, W), uint8 or float in [0, 1], to float (n, C, size, size) in [0, 1]."""
    return apply_each([config], images, [parameters])[0]


def apply_each(
    configs: Sequence[AugmentConfig],
    images: Tensor,
    parameters: Sequence[Parameters],
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """Make one view of the images for each recipe and its parameters."""
    made = [plain(config, images, drawn) for config, drawn in zip(configs, parameters, strict=True)]
    return [view.contiguous(memory_format=layout) for view in made]


def plain(config: AugmentConfig, images: Tensor, parameters: Parameters) -> Tensor:
    """`apply` by PyTorch's operations, on any device."""
    parameters = parameters.to(images.device)
    n, channels, height, width = images.shape
    size = config.size or min(height, width)
    out = torch.empty(n, channels, size, size, device=images.device)
    step = at_once(images, size)
    for start in range(0, n, step):
        part = slice(start, start + step)
        out[part] = _apply(config, size, images[part], parameters[part])
    return out


def at_once(images: Tensor, size: int) -> int:
    """Images that are made into views of `size` at a time: on a processor as many as its cache holds, elsewhere all."""
    n, _, height, width = images.shape
    return max(1, CACHE_FLOATS // max(height * width, size * size)) if images.is_cpu else max(1, n)


def _apply(config: AugmentConfig, size: int, images: Tensor, p: Parameters) -> Tensor:
    x = resized_crop(unit(images), p.box, size, p.flip)
    if config.jitter > 0:
        color_jitter_(x, p)
    if config.grey > 0 and x.shape[1] == 3:
        x.lerp_(grey(x), p.grey[:, None, None, None])
    if config.blur > 0:
        x = gaussian_blur(x, p.sigma, config.kernel(size))
    if config.solarize > 0:
        x = solarized(x, p.solarize, config.solarize_threshold)
    return x


def unit(images: Tensor) -> Tensor:
    """Images as float32 in [0, 1]."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def augment(config: AugmentConfig, images: Tensor, generator: torch.Generator) -> Tensor:
    """A random view of every image (n, C, H, W); each call draws new parameters."""
    height, width = images.shape[-2:]
    return apply(config, images, draw(config, len(images), height, width, generator))


def centre(images: Tensor, size: int, share: float = 1.0) -> Tensor:
    """The view for evaluation: a centred square, resized to size x size, float in [0, 1].

    share: its side over the images' shorter one; by default it is the largest square.
    """
    height, width = images.shape[-2:]
    side = max(1, round(share * min(height, width)))
    if height == width == size == side:
        return unit(images)
    box = torch.tensor([(height - side) // 2, (width - side) // 2, side, side], dtype=torch.float32)
    return resized_crop(unit(images), box.to(images.device).expand(len(images), -1), size)
