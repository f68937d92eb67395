"""Encoded images to one tensor, or to a set that stays encoded where memory does not hold it."""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted
from dipole.vision.decoding import Encoded, Stream, attempt, decode, describe
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Decoding


def decode_all(
    name: str,
    items: Sequence[str],
    read: Callable[[int], bytes],
    labels: Tensor | None,
    class_names: tuple[str, ...],
    options: Decoding,
    left_out: Sequence[str] = (),
) -> ImageSet:
    """Decode images in parallel to one tensor; a file that cannot be decoded is named, and refused or skipped.

    A set that would take more than `options.memory` bytes stays encoded and is decoded batch by batch.

    left_out: files that were not taken, and why, for the record.
    """
    size = options.size
    if not items:
        raise DataError(f"{name} holds no images.")
    first = _first(items, read, size)
    if first is not None and first.nbytes * len(items) > options.memory:
        return stay_encoded(name, items, read, labels, class_names, options, left_out=left_out)
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
    labels = None if labels is None else labels[kept]
    return ImageSet(name, tensor, labels, class_names, (*broken, *left_out))


def stay_encoded(
    name: str,
    items: Sequence[str],
    read: Callable[[int], bytes],
    labels: Tensor | None,
    class_names: tuple[str, ...],
    options: Decoding,
    rows: Tensor | None = None,
    stream: Stream | None = None,
    left_out: Sequence[str] = (),
) -> ImageSet:
    """Images that are decoded batch by batch, to squares for the probes, and cropped from what is stored for training.

    rows: which of the items; all by default. The squares have `options.size`, or the images' own where they are square.
    """
    size = options.size
    if size is None:
        first = _first(items, read, None)
        if first is None:
            raise DataError(f"none of {counted(len(items), 'image file')} can be decoded.")
        if first.shape[0] != first.shape[1]:
            raise DataError(
                f"{name}: images that are decoded batch by batch need vision.data.size, the side of the squares that "
                f"probes see (random crops are cut from the whole image); {items[0]} has {first.shape[1]} x "
                f"{first.shape[0]} pixels. To hold all in memory as they are, raise vision.data.memory."
            )
        size = first.shape[0]
    chosen = torch.arange(len(items)) if rows is None else rows
    encoded = Encoded(items, read, chosen, size, options.on_corrupt, stream=stream)
    return ImageSet(name, encoded, labels, class_names, tuple(left_out))


def _first(items: Sequence[str], read: Callable[[int], bytes], size: int | None) -> np.ndarray | None:
    """The first image that can be decoded."""
    found = (_attempt(read, i, size) for i in range(len(items)))
    return next((each for each in found if not isinstance(each, str)), None)


def _attempt(read: Callable[[int], bytes], i: int, size: int | None) -> np.ndarray | str:
    return attempt(lambda: read(i), lambda data: decode(data, size))
