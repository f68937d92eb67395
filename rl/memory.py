"""Free memory, and an error with the bytes if a replay buffer cannot fit."""

import shutil
from pathlib import Path

import torch

from dipole.core.utils.errors import TrainingError
from dipole.core.utils.memory import available


def available_bytes(place: torch.device | Path) -> int:
    """Bytes that a device, or the disk of a folder, has left."""
    if isinstance(place, Path):
        return shutil.disk_usage(place).free
    return available(place)


def has_room_for(needed: int, device: torch.device) -> bool:
    """Return whether a GPU has room for twice as many bytes: these, and as many for computing."""
    return device.type == "cuda" and 2 * needed <= available_bytes(device)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def require_bytes(needed: int, transitions: int, frame: tuple[int, ...], place: torch.device | Path) -> None:
    """Raise TrainingError, before anything is allocated, if `needed` bytes are not free on the device or disk."""
    free = available_bytes(place)
    if needed > free:
        cure = "free memory, or choose storage='disk'"
        if isinstance(place, Path):
            cure = "choose a larger disk (TMPDIR)"
        fits = int(transitions * free / needed * 0.9)
        raise TrainingError(
            f"a replay buffer of {transitions:,} transitions with frames of {'x'.join(map(str, frame))} bytes needs "
            f"{needed:,} bytes ({gigabytes(needed)}), but {free:,} bytes ({gigabytes(free)}) are free on "
            f"{place}. Lower buffer_size (about {fits:,} would fit), render smaller frames, {cure}."
        )
