"""Sizes that somebody's settings ask for are held against the memory that is there before it is taken."""

import math

import torch
from torch import Tensor

from dipole.core.ground.errors import OptionError
from dipole.core.ground.machine import free_memory

UNKNOWN = 1 << 62


def available(device: torch.device) -> int:
    """Bytes that a device has left; the most where nobody says, and for tensors without contents."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory() if device.type == "cpu" else UNKNOWN


def check_fits(what: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor that does not fit beside its gradient.

    Raises:
        OptionError: what it is, how large, and how much there is.
    """
    wanted = 2 * math.prod(shape) * like.dtype.itemsize
    meta = torch.get_default_device().type == "meta"
    there = UNKNOWN if meta else available(like.device)
    if wanted > there:
        size = " x ".join(map(str, shape))
        raise OptionError(
            f"{what} of {size} takes {wanted / 1e9:.4g} GB with its gradient, {there / 1e9:.4g} GB are there; choose a "
            "smaller size."
        )
