"""Operations on batches of images with one parameter per image: crop, colour jitter, blur, solarization.

Images are float (n, C, H, W) in [0, 1]. Names that end in an underscore write into their argument.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dipole.core.utils.transfer import constant

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, the greyscale weights of Pillow and torchvision


def unit(images: Tensor) -> Tensor:
    """Convert uint8 images, or floats in [0, 1] of any precision, to float32 in [0, 1]."""
    if images.dtype == torch.uint8:
        return images.float().div_(255)
    return images.float()


def resampling(start: Tensor, extent: Tensor, source: int, target: int, mirror: Tensor | None = None) -> Tensor:
    """Return matrices (n, target, source) that resample `extent` pixels from `start` to `target` pixels on one axis.

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
    """Crop every image to its box (n, 4), resize it to size x size and mirror it where flip (n,) is 1."""
    n, channels, height, width = images.shape
    across = resampling(box[:, 1], box[:, 3], width, size, flip)
    down = resampling(box[:, 0], box[:, 2], height, size)
    rows = torch.bmm(images.reshape(n, channels * height, width), across.mT)
    return torch.matmul(down[:, None], rows.view(n, channels, height, size))


def grey(images: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W) of RGB images."""
    r, g, b = images.unbind(1)
    return (r * LUMA[0]).add_(g, alpha=LUMA[1]).add_(b, alpha=LUMA[2]).unsqueeze_(1)


def adjust_brightness_(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by factor (n,), clamped to [0, 1]."""
    return images.mul_(factor[:, None, None, None]).clamp_(0, 1)


def adjust_contrast_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend every image with its mean luma: factor x + (1 - factor) mean, clamped to [0, 1]."""
    mean = images.mean((2, 3))
    if images.shape[1] == 3:
        mean = (mean * constant(LUMA, mean)).sum(1, keepdim=True)
    offset = (1 - factor[:, None]) * mean
    return images.mul_(factor[:, None, None, None]).add_(offset[:, :, None, None]).clamp_(0, 1)


def adjust_saturation_(images: Tensor, factor: Tensor) -> Tensor:
    """Blend every pixel with its luma: factor x + (1 - factor) grey(x), clamped to [0, 1]."""
    if images.shape[1] != 3:
        return images
    factor = factor[:, None, None, None]
    luma = grey(images).mul_(1 - factor)
    return images.mul_(factor).add_(luma).clamp_(0, 1)


def adjust_hue_(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate the hue of RGB images by turns (n,) in [-0.5, 0.5] at constant HSV saturation and value."""
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


def blurring(sigma: Tensor, size: int, kernel: int) -> Tensor:
    """Return matrices (n, size, size) that blur one axis by sigma (n,) pixels, with a reflected border."""
    kernel = min(kernel, 2 * size - 1)  # as far as the border can be reflected
    taps = torch.arange(kernel, device=sigma.device) - kernel // 2
    weight = torch.exp(-0.5 * (taps / sigma.clamp_min(1e-3)[:, None]) ** 2)
    weight = weight / weight.sum(1, keepdim=True)
    source = (torch.arange(size, device=sigma.device)[:, None] + taps).abs()  # (size, kernel)
    source = (size - 1) - ((size - 1) - source).abs()
    matrix = weight.new_zeros(len(sigma), size, size)
    return matrix.scatter_add_(2, source.expand(len(sigma), -1, -1), weight[:, None].expand(-1, size, -1).contiguous())


def gaussian_blur(images: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Blur every image with its own sigma (n,), separably."""
    n, channels, height, width = images.shape
    across = blurring(sigma, width, kernel)
    down = across if height == width else blurring(sigma, height, kernel)
    rows = torch.bmm(images.reshape(n, channels * height, width), across.mT)
    return torch.matmul(down[:, None], rows.view(n, channels, height, width))


def solarize(images: Tensor, where: Tensor, threshold: int) -> Tensor:
    """Invert values from `threshold` / 255 on, in the images where `where` (n,) is 1: Pillow's `ImageOps.solarize`."""
    chosen = (images >= threshold / 255) & (where > 0)[:, None, None, None]
    return torch.where(chosen, 1 - images, images)


def centre(images: Tensor, size: int, share: float = 1.0) -> Tensor:
    """Return the centred square of this share of the shorter side, resized to size x size, float in [0, 1]."""
    height, width = images.shape[-2:]
    side = max(1, round(share * min(height, width)))
    if height == width == size == side:
        return unit(images)
    if share == 1 and height != width:
        short = min(height, width)
        sides = [size * height // short, size * width // short]
        whole = F.interpolate(unit(images), sides, mode="bilinear", antialias=True)
        top, left = ((now - size) // 2 for now in whole.shape[-2:])
        return whole[..., top : top + size, left : left + size]
    box = torch.tensor([(height - side) // 2, (width - side) // 2, side, side], dtype=torch.float32)
    return resized_crop(unit(images), box.to(images.device).expand(len(images), -1), size)
