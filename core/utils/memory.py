"""Compare the sizes that settings ask for with the free memory before it is allocated."""

import math

import torch
from torch import Tensor

from dipole.core.utils.errors import OptionError
from dipole.core.utils.machine import free_memory

UNKNOWN = 1 << 62


def available(device: torch.device) -> int:
    """Return the free bytes of a device. UNKNOWN for the meta device and for devices that do not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu":
        return free_memory()
    return UNKNOWN


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory, in Python, on a GPU or in PyTorch's CPU allocator."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def check_fits(what: str, shape: tuple[int, ...], like: Tensor, beside: str = "its gradient") -> None:
    """Raise OptionError if a tensor and its gradient (`beside`), of the same size, do not fit into memory."""
    wanted = 2 * math.prod(shape) * like.dtype.itemsize
    if torch.get_default_device().type == "meta":
        return
    there = available(like.device)
    if wanted > there:
        size = " x ".join(map(str, shape))
        raise OptionError(
            f"{what} of {size} takes {wanted / 1e9:.4g} GB with {beside}, {there / 1e9:.4g} GB are free. Choose a "
            "smaller size."
        )
