"""Sizes that somebody's settings ask for are held against the memory that is there before it is taken."""

import math

import torch
from torch import Tensor

from dipole.core.utils.errors import OptionError
from dipole.core.utils.machine import free_memory

UNKNOWN = 1 << 62


def available(device: torch.device) -> int:
    """Bytes that a device has left; the most where nobody says, and for tensors without contents."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_memory() if device.type == "cpu" else UNKNOWN


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused: by Python, by a GPU, or by PyTorch's allocator of the processor."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def check_fits(what: str, shape: tuple[int, ...], like: Tensor, beside: str = "its gradient") -> None:
    """Refuse a tensor that does not fit beside its gradient, or beside another of its size.

    Raises:
        OptionError: what it is, how large, and how much there is.
    """
    wanted = 2 * math.prod(shape) * like.dtype.itemsize
    meta = torch.get_default_device().type == "meta"
    there = UNKNOWN if meta else available(like.device)
    if wanted > there:
        size = " x ".join(map(str, shape))
        raise OptionError(
            f"{what} of {size} takes {wanted / 1e9:.4g} GB with {beside}, {there / 1e9:.4g} GB are there; choose a "
            "smaller size."
        )
