"""How much memory is free, and a refusal with the bytes where a replay buffer cannot fit."""

import torch

from dipole.core.ground.errors import TrainingError
from dipole.core.ground.memory import available as available_bytes


def has_room_for(needed: int, device: torch.device) -> bool:
    """Whether a GPU would hold so many bytes and as many again are left for what is computed there."""
    return device.type == "cuda" and 2 * needed <= available_bytes(device)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def require_bytes(needed: int, transitions: int, frame: tuple[int, ...], device: torch.device) -> None:
    """Raise TrainingError, before anything is allocated, if `needed` bytes are not free on the device."""
    free = available_bytes(device)
    if needed > free:
        fits = int(transitions * free / needed * 0.9)
        raise TrainingError(
            f"a replay buffer of {transitions:,} transitions with frames of {'x'.join(map(str, frame))} bytes needs "
            f"{needed:,} bytes ({gigabytes(needed)}), but {free:,} bytes ({gigabytes(free)}) are free on "
            f"{device}. Lower buffer_size (about {fits:,} would fit), render smaller frames, or free memory."
        )
