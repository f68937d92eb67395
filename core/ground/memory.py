"""Sizes that somebody's settings ask for are held against the memory that is there before it is taken."""

import math
from pathlib import Path

import torch
from torch import Tensor

from dipole.core.ground.errors import OptionError


def available(device: torch.device) -> float:
    """Bytes that a device has left; infinity where nobody says, and for tensors without contents."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return math.inf
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    told = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return math.inf if told is None else int(told.split()[1]) * 1024


def check_fits(what: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor that does not fit beside its gradient.

    Raises:
        OptionError: what it is, how large, and how much there is.
    """
    wanted = 2 * math.prod(shape) * like.dtype.itemsize
    meta = torch.get_default_device().type == "meta"
    there = float(2**62) if meta else min(available(like.device), float(2**62))
    if wanted > there:
        size = " x ".join(map(str, shape))
        raise OptionError(
            f"{what} of {size} takes {wanted / 1e9:.4g} GB with its gradient, {there / 1e9:.4g} GB are there; choose a "
            "smaller size."
        )
