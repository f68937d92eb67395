"""Encoded images to one tensor, or to a set that stays encoded where memory does not hold it."""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dipole.core.ground.errors import DataError
from dipole.vision.decoding import Encoded, attempt, describe
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Decoding


def decode_all(
    name: str,
    items: Sequence[str],
    read: Callable[[int], bytes],
    labels: Tensor | None,
    class_names: tuple[str, ...],
    options: Decoding,
) -> ImageSet:
    """Decode images in parallel to one tensor; a file that cannot be decoded is named, and refused or skipped.

    A set that would take more than `options.memory` bytes stays encoded and is decoded batch by batch.
    """
    size = options.size
    if not items:
        raise DataError(f"{name} holds no images.")
    first = next((found for i in range(len(items)) if not isinstance(found := _attempt(read, i, size), str)), None)
    if first is not None and first.shape[0] == first.shape[1] and first.nbytes * len(items) > options.memory:
        rows = torch.arange(len(items))
        encoded = Encoded(items, read, rows, first.shape[0], options.on_corrupt)
        return ImageSet(name, encoded, labels, class_names)
    images: list[np.ndarray] = []
    kept: list[int] = []
    broken: list[str] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for i, found in enumerate(pool.map(lambda i: _attempt(read, i, size), range(len(items)))):
            if isinstance(found, str):
                broken.append(f"{items[i]} ({found})")
                continue
            if images and found.shape != images[0].shape:
                raise DataError(
                    f"{items[i]} has {found.shape[1]} x {found.shape[0]} pixels, but {items[kept[0]]} "
                    f"{images[0].shape[1]} x {images[0].shape[0]}; set vision.data.size to bring all to one size."
                )
            images.append(found)
            kept.append(i)
    if broken:
        if options.on_corrupt == "refuse" or not images:
            raise DataError(
                f"{describe(broken, len(items))}. Repair or remove them, or set vision.data.on_corrupt = 'skip'."
            )
        warnings.warn(f"skipped {describe(broken, len(items))}", stacklevel=2)
    tensor = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return ImageSet(name, tensor, None if labels is None else labels[kept], class_names, tuple(broken))


def _attempt(read: Callable[[int], bytes], i: int, size: int | None) -> np.ndarray | str:
    return attempt(lambda: read(i), size)
