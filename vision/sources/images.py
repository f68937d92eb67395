"""Encoded images to an `ImageSet`: decoded to one tensor, or left encoded if memory is too small."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.text import are, counted, warn
from dipole.vision.decoding import Encoded, Stream, attempt, decode, describe, first_names, in_parallel
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding

CONVERT = "Give shards as wds:FILE.tar, unpack archives, save others by numpy.savez(FILE, images=..., labels=...)"


def check_wanted(name: str, names: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise DataError if a data set with classes of these names lacks some of a class list."""
    missing = [each for each in wanted if each not in names]
    if missing:
        raise DataError(
            f"{name} lacks {counted(len(missing), 'class', 'classes')} of the class list: {', '.join(missing[:5])}."
            f"{nearest(missing[0], names)} It has {counted(len(names), 'named class', 'classes')}."
        )


def wanted_rows(name: str, labels: Tensor, names: Sequence[str], wanted: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the rows of the wanted classes, and their labels in the order of `wanted`."""
    check_wanted(name, names, wanted)
    new = torch.full((len(names) + 1,), -1)
    for label, each in enumerate(wanted):
        new[names.index(each)] = label
    mapped = new[labels]
    rows = (mapped >= 0).nonzero().flatten()
    return rows, mapped[rows]


def select(images: ImageSet, wanted: Classes) -> ImageSet:
    """Return the images of the given classes, or all for None."""
    if wanted is None:
        return images
    if images.labels is None:
        raise DataError(f"{images.name} has no labels, so a class list cannot be applied.")
    rows, labels = wanted_rows(images.name, images.labels, images.class_names, wanted)
    return replace(images.take(rows), labels=labels, class_names=wanted)


def warn_of_left_out(name: str, images: Sequence[str]) -> None:
    """Name images that are not read, with the reason of each."""
    if images:
        count = f"{counted(len(images), 'image')} of {name} {are(len(images))}"
        warn(f"{count} left out: {first_names(images, '; ')}", stacklevel=3)


def decode_all(
    name: str,
    items: Sequence[str],
    read: Callable[[int], bytes],
    labels: Tensor | None,
    class_names: tuple[str, ...],
    options: Decoding,
    left_out: Sequence[str] = (),
    stream: Stream | None = None,
) -> ImageSet:
    """Decode images in parallel to one tensor. A stream, and more than `options.memory` bytes, stay encoded."""
    if not items:
        raise DataError(f"{name} holds no images.")

    def decoded(i: int) -> np.ndarray | str:
        return attempt(lambda: read(i), lambda data: decode(data, options.size))

    first = None
    if stream is None or options.size is None:
        first = next((each for each in map(decoded, range(len(items))) if not isinstance(each, str)), None)
    if stream is not None or (first is not None and first.nbytes * len(items) > options.memory):
        size = options.size or _side(name, items, first, stream is None and options.memory > 0)
        encoded = Encoded(items, read, torch.arange(len(items)), size, options.on_corrupt, {}, stream, labels)
        return ImageSet(name, encoded, labels, class_names, tuple(left_out))
    images: list[np.ndarray] = []
    kept: list[int] = []
    broken: list[str] = []
    for i, found in enumerate(in_parallel(decoded, range(len(items)))):
        if isinstance(found, str):
            broken.append(f"{items[i]} ({found})")
            continue
        if images and found.shape != images[0].shape:
            raise DataError(
                f"{items[i]} has {found.shape[1]} x {found.shape[0]} pixels, but {items[kept[0]]} "
                f"{images[0].shape[1]} x {images[0].shape[0]}. Set vision.data.size to bring all to one size."
            )
        images.append(found)
        kept.append(i)
    if broken and (options.on_corrupt == "refuse" or not images):
        other = ", or set vision.data.on_corrupt = 'skip'" if options.on_corrupt == "refuse" else ""
        raise DataError(f"{describe(broken, len(items))}. Repair or remove them{other}.")
    if broken:
        warn(f"skipped {describe(broken, len(items))}")
    tensor = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    if labels is not None:
        labels = labels[kept]
    return ImageSet(name, tensor, labels, class_names, (*broken, *left_out))


def _side(name: str, items: Sequence[str], first: np.ndarray | None, fits: bool) -> int:
    """Return the side of the squares for probes, that of the first image. fits: whether more memory would do."""
    if first is None:
        raise DataError(f"none of {counted(len(items), 'image file')} can be decoded.")
    if first.shape[0] != first.shape[1]:
        fix = "Set it, or raise vision.data.memory to hold all as they are" if fits else "Set it"
        raise DataError(
            f"{name}: images that are decoded batch by batch need vision.data.size, the side of the squares that "
            f"probes see (random crops are cut from the whole image); {items[0]} has {first.shape[1]} x "
            f"{first.shape[0]} pixels. {fix}."
        )
    return int(first.shape[0])
