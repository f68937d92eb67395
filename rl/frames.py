"""Rings of pixels: single channels of images, each stored once, in host memory, on a disk or on the training device."""

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from dipole.core.utils.errors import TrainingError
from dipole.core.utils.files import why
from dipole.core.utils.memory import available
from dipole.core.utils.text import size
from dipole.core.utils.transfer import to_device

Array = NDArray[Any]
Size = int | tuple[int, int]
"""Height and width, or one number for both."""

_AT_ONCE = 4096  # planes that are copied at a time when a ring moves


class Frames:
    """A ring of planes (n_envs, F, H, W) in host memory. A plane is one channel of one frame."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.data = self._reserved()

    def _reserved(self) -> Any:
        return np.empty(self.shape, np.uint8)  # not touched: the system commits the pages as they are written

    def put(self, env: int, slots: Array, planes: NDArray[np.uint8]) -> None:
        """Write planes (n, H, W) at slots (n,)."""
        self.data[env, slots] = planes

    def take(self, env: int, slots: Array) -> NDArray[np.uint8]:
        """Return planes (n, H, W) on the host."""
        return self.data[env, slots]

    def stacks(self, env: Array, slots: Array) -> Tensor:
        """Return whole stacks (B, C, H, W)."""
        return self._read(self.data, env[:, None], slots)

    def windows(self, env: Array, slots: Array, top: Array, left: Array, size: Size) -> Tensor:
        """Return a window of each stack (B, C, height, width). Only its pixels are copied."""
        return self._read(self._sliding(*extents(size)), env[:, None], slots, top[:, None], left[:, None])

    def _sliding(self, height: int, width: int) -> Any:
        return sliding_window_view(self.data, (height, width), axis=(-2, -1))

    def _read(self, view: Any, *places: Array) -> Tensor:
        return to_device(torch.from_numpy(view[places]), self.device)

    def moved(self, ring: int, kept: Iterable[tuple[int, int]], device: torch.device) -> "Frames":
        """Return the same planes in a ring of another length, or on another device.

        Of each environment the planes from the first to before the last serial number in `kept` are taken over.
        """
        other = type(self)((self.shape[0], ring, *self.shape[2:]), device)
        for env, (first, last) in enumerate(kept):
            for start in range(first, last, _AT_ONCE):
                serials = np.arange(start, min(start + _AT_ONCE, last))
                other.put(env, serials % ring, self.take(env, serials % self.shape[1]))
        return other


class DiskFrames(Frames):
    """The same ring in an unnamed file of the temporary folder (TMPDIR), for more frames than memory holds."""

    def _reserved(self) -> NDArray[np.uint8]:
        size = math.prod(self.shape)
        try:  # all at once: a disk that fills up later would end the process at a write
            with tempfile.TemporaryFile(prefix="dipole-replay-") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise TrainingError(
                f"cannot reserve {size:,} bytes for replay in {tempfile.gettempdir()}: {why(error)} TMPDIR names "
                "another folder."
            ) from error
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)  # draws are random: do not read ahead
        return np.frombuffer(mapped, np.uint8).reshape(self.shape)


class DeviceFrames(Frames):
    """The same ring in the memory of the training device: no copies from the host while training."""

    def _reserved(self) -> Tensor:
        return torch.empty(self.shape, dtype=torch.uint8, device=self.device)

    def put(self, env: int, slots: Array, planes: NDArray[np.uint8]) -> None:
        self.data[env, self._index(slots)] = to_device(torch.from_numpy(np.ascontiguousarray(planes)), self.device)

    def take(self, env: int, slots: Array) -> NDArray[np.uint8]:
        return self.data[env, self._index(slots)].cpu().numpy()

    def _sliding(self, height: int, width: int) -> Tensor:
        view: Tensor = self.data.unfold(-2, height, 1).unfold(-2, width, 1)
        return view

    def _read(self, view: Tensor, *places: Array) -> Tensor:
        return view[tuple(map(self._index, places))]

    def _index(self, values: Array) -> Tensor:
        return to_device(torch.as_tensor(values, dtype=torch.long), self.device)


STORES: dict[str, type[Frames]] = {"host": Frames, "device": DeviceFrames, "disk": DiskFrames}


def extents(size: Size) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def available_bytes(place: torch.device | Path) -> int:
    """Return the bytes that a device, or the disk of a folder, has left."""
    return shutil.disk_usage(place).free if isinstance(place, Path) else available(place)


def require_bytes(needed: int, transitions: int, frame: tuple[int, ...], place: torch.device | Path) -> None:
    """Raise TrainingError, before anything is allocated, if `needed` bytes are not free on the device or disk."""
    free = available_bytes(place)
    if needed > free:
        cure = "free memory, or choose storage='disk' (in a recipe rl.storage)"
        if isinstance(place, Path):
            cure = "choose a larger disk (TMPDIR)"
        fits = int(transitions * free / needed * 0.9)
        raise TrainingError(
            f"a replay buffer of {transitions:,} transitions with frames of {'x'.join(map(str, frame))} bytes needs "
            f"{needed:,} bytes ({size(needed)}), but {free:,} bytes ({size(free)}) are free on {place}. "
            f"Lower buffer_size (rl.buffer_size; about {fits:,} would fit), render smaller frames, {cure}."
        )
