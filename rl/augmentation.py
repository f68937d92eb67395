"""Random views of stored frames: CURL's crop, DrQ's shift (also bilinear), none, or your own function.

One offset per sample serves all frames of its stack, so that motion inside the stack survives.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.transfer import to_device
from dipole.rl.frames import Frames, Size, extents

NAMES = ("crop", "shift", "bilinear", "none")
SHIFT = 4  # pixels, DrQ (Kostrikov et al. 2020)


class Centre:
    """The middle of the frame, always the same: no augmentation."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def draw(self, frames: Frames, env: NDArray[Any], slots: NDArray[Any], rng: np.random.Generator) -> Tensor:
        """Return views (B, C, *size) of the stacks `slots` (B, k) of environments `env` (B,)."""
        room = np.subtract(frames.shape[-2:], extents(self.size))
        top, left = (self._offsets(int(each), len(env), rng) for each in room)
        return frames.windows(env, slots, top, left, self.size)

    def _offsets(self, room: int, count: int, rng: np.random.Generator) -> NDArray[Any]:
        return np.full(count, room // 2)


class Crop(Centre):
    """A random window at offsets 0..m, m = rendered size - size, or 0..m-1 as in the CURL repository."""

    def __init__(self, size: Size, inclusive: bool = True) -> None:
        super().__init__(size)
        self.inclusive = inclusive

    def _offsets(self, room: int, count: int, rng: np.random.Generator) -> NDArray[Any]:
        return rng.integers(0, max(room + self.inclusive, 1), count)


class Shift(Centre):
    """The middle of the frame moved by up to 4 pixels each way, its border repeated (DrQ)."""

    def draw(self, frames: Frames, env: NDArray[Any], slots: NDArray[Any], rng: np.random.Generator) -> Tensor:
        middle = super().draw(frames, env, slots, rng)  # (B, C, h, w)
        top, left = rng.integers(0, 2 * SHIFT + 1, (2, len(env)))
        return shift(middle, top, left, SHIFT)


class Bilinear(Centre):
    """`Shift` by any fraction of a pixel, interpolated between the four pixels around (Yarats et al. 2021, 3.1)."""

    def draw(self, frames: Frames, env: NDArray[Any], slots: NDArray[Any], rng: np.random.Generator) -> Tensor:
        middle = super().draw(frames, env, slots, rng)
        top, left = rng.uniform(0, 2 * SHIFT, (2, len(env)))
        return shift_bilinear(middle, top, left, SHIFT).round_().to(torch.uint8)


class Custom:
    """A function (B, C, H, W) uint8 -> (B, C, h, w), values 0..255. It may draw from torch's generator."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int, rendered: Size) -> None:
        self.function = function
        self.square = isinstance(rendered, int)
        shape = (2, channels, *extents(rendered))
        probe = self._checked(torch.arange(math.prod(shape)).remainder(256).to(torch.uint8).view(shape))
        if probe.is_floating_point() and probe.max() <= 1:
            raise ConfigError(
                f"the augmentation function returns values from {float(probe.min()):g} to {float(probe.max()):g}, but "
                "the encoder divides by 255 itself: let it return 0..255, as uint8 or float."
            )
        self.size: Size = one_number(*probe.shape[-2:])

    def draw(self, frames: Frames, env: NDArray[Any], slots: NDArray[Any], rng: np.random.Generator) -> Tensor:
        return self._checked(frames.stacks(env, slots))

    def _checked(self, images: Tensor) -> Tensor:
        out = self.function(images)
        shape = tuple(getattr(out, "shape", ()))
        fits = len(shape) == 4 and shape[:2] == images.shape[:2] and (not self.square or shape[2] == shape[3])
        if not isinstance(out, Tensor) or not fits:
            raise ConfigError(
                f"the augmentation function must return a tensor (B, C, h, h) for its input {tuple(images.shape)}, "
                f"got {shown(out)}."
            )
        return out


Augmentation = Centre | Custom


def shift(images: Tensor, top: NDArray[Any], left: NDArray[Any], pad: int) -> Tensor:
    """Move images (B, C, h, w) by (top - pad, left - pad) pixels, integers (B,) in 0..2 pad. Borders are repeated."""
    height, width = images.shape[-2:]
    device = images.device
    rows = to_device(torch.as_tensor(top), device)[:, None] + torch.arange(height, device=device) - pad  # (B, h)
    columns = to_device(torch.as_tensor(left), device)[:, None] + torch.arange(width, device=device) - pad
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    batch = torch.arange(len(images), device=device)[:, None]
    moved = images.transpose(1, 2)[batch, rows]  # (B, h, C, w)
    return moved.permute(0, 3, 2, 1)[batch, columns].permute(0, 2, 3, 1).contiguous()


def shift_bilinear(images: Tensor, top: NDArray[Any], left: NDArray[Any], pad: int) -> Tensor:
    """As `shift`, for real shifts: pixels of (B, C, h, w) float32 are interpolated between the four around them."""
    height, width = images.shape[-2:]
    device = images.device
    padded = torch.nn.functional.pad(images.float(), (pad,) * 4, "replicate")
    down, right = (to_device(torch.as_tensor(each, dtype=torch.float32), device)[:, None] for each in (top, left))
    rows = torch.arange(height, device=device) + down
    columns = torch.arange(width, device=device) + right
    # grid_sample's coordinates: -1 and 1 are the outer edges of the image, pixel i lies at (2 i + 1) / extent - 1.
    rows, columns = ((2 * places + 1) / (extent + 2 * pad) - 1 for places, extent in ((rows, height), (columns, width)))
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)  # (B, h, w, 2)
    return torch.nn.functional.grid_sample(padded, grid, padding_mode="border", align_corners=False)


def shown(value: Any) -> str:
    """Return the shape of a tensor, or the type of anything else, for a message."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def one_number(height: int, width: int) -> Size:
    """Return the size of an image, as one number if it is square."""
    return height if height == width else (height, width)


def choose(choice: Any, channels: int, rendered: Size, size: int | None, inclusive: bool) -> Augmentation:
    """Build the augmentation for a name in NAMES, or a function.

    The network sees a square of `size`. By default 84 % of the rendered height and width for crops (84 of 100), the
    rendered size otherwise.
    """
    if callable(choice):
        custom = Custom(choice, channels, rendered)
        if size not in (None, custom.size):
            raise ConfigError(
                f"image_size is {size}, but the augmentation function returns images of size {custom.size}."
            )
        return custom
    if choice not in NAMES:
        hint = nearest(str(choice), NAMES)
        raise ConfigError(f"augmentation must be one of {', '.join(NAMES)} or a function, got {choice!r}.{hint}")
    height, width = extents(rendered)
    if size is not None and not 1 <= size <= min(height, width):
        raise ConfigError(f"image_size must be between 1 and the rendered size {min(height, width)}, got {size}.")
    if size is None and choice == "crop":
        height, width = round(0.84 * height), round(0.84 * width)
    seen = size or one_number(height, width)
    if choice == "crop":
        return Crop(seen, inclusive)
    return {"shift": Shift, "bilinear": Bilinear, "none": Centre}[choice](seen)
