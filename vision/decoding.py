"""Images that stay encoded and are decoded in parallel on access: data sets larger than memory, and streams."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dipole.core.utils.errors import DataError, ReceivedError
from dipole.core.utils.pictures import open_rgb
from dipole.core.utils.received import read_bytes
from dipole.core.utils.text import counted, warn

OnCorrupt = Literal["refuse", "skip"]
LARGEST = 2**30
"""Largest image file in bytes."""
PROBED = 1000  # images whose bytes enter the fingerprint
S = TypeVar("S")
T = TypeVar("T")


def decode(data: bytes, size: int | None, exact: bool = False) -> np.ndarray:
    """Decode an image to (H, W, 3) uint8, size x size if given. exact: decode a JPEG at its full resolution."""
    picture = open_rgb(data, None if exact else size)
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=centred_box(*picture.size, size))
    return np.asarray(picture)


def centred_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return the box (left, top, right, bottom) for evaluation, as image processors of transformers cut it."""
    ends = []
    for side in (width, height):
        resized = size * side // min(width, height)
        start = (resized - size) // 2
        ends.append((start * side / resized, (start + size) * side / resized))
    (left, right), (top, bottom) = ends
    return left, top, right, bottom


def file_bytes(path: Path) -> bytes:
    """Return the content of an image file. Raise OSError for pipes, devices and files that are too large."""
    try:
        return read_bytes(path, LARGEST)
    except ReceivedError as error:
        raise OSError(error.reason) from None


def attempt(read: Callable[[], bytes], use: Callable[[bytes], T]) -> T | str:
    """Return `use` of the bytes that `read` gives, or the reason why it failed."""
    try:
        return use(read())
    except DataError:
        raise  # concerns the data set, not this image
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        # Remove memory addresses: they change from run to run.
        return re.sub(r"\s*:?\s*<[^>]* at 0x[^>]*>", "", str(error)) or type(error).__name__


def in_parallel(use: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Yield `use` of each item, in their order, from a thread for each core."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from pool.map(use, items)


def describe(broken: Sequence[str], total: int) -> str:
    """Say how many files are broken, and name the first five."""
    return f"{len(broken)} of {counted(total, 'image file')} cannot be decoded: {first_names(broken, '; ')}"


def first_names(names: Iterable[str], between: str = ", ") -> str:
    """Join the first five names, and say how many more there are."""
    names = list(names)
    if len(names) > 5:
        names = [*names[:5], f"and {len(names) - 5} more"]
    return between.join(names)


@dataclass(frozen=True, eq=False)
class Stream:
    """The order in which the images of a set can be read.

    Args:
        bounds: (shards + 1,) the first image of each shard, and the number of images.
        buffer: images among which the order is shuffled.
        forward: whether they can only be read one after another.
    """

    bounds: Tensor
    buffer: int
    forward: bool


@dataclass(frozen=True, eq=False)
class Encoded:
    """n encoded images. `self[index]` decodes some of them in parallel to uint8 (k, 3, size, size).

    A file that cannot be decoded raises an error when it is read. With on_corrupt = "skip" it is in `skipped`, and
    the next readable image of its class takes its place. Random crops are cut from the stored images (`views`).

    Args:
        names: of all images of the data set.
        read: place in `names` -> the encoded bytes.
        rows: (n,) the places in `names` that belong to this set.
        size: side of the decoded squares in pixels.
        on_corrupt: "refuse" or "skip".
        skipped: place in `names` -> reason. All parts of a set share it.
        stream: the order for reading, or None if images can be read in any order.
        labels: (N,) class of each of the N names, or None. In a forward-only stream any next image takes the place.

    Raises:
        DataError: from reading, an image cannot be decoded, or none can.
    """

    names: Sequence[str]
    read: Callable[[int], bytes]
    rows: Tensor
    size: int
    on_corrupt: OnCorrupt = "refuse"
    skipped: dict[int, str] = field(default_factory=dict)
    stream: Stream | None = None
    labels: Tensor | None = None

    dtype = torch.uint8
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """(n, 3, size, size), as of a tensor."""
        return torch.Size((len(self.rows), 3, self.size, self.size))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Tensor) -> "Encoded":
        """Return a part of the set without decoding it.

        Args:
            index: (k,) places in the set.
        """
        return replace(self, rows=self.rows[index])

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        return _stacked(self._map(index, lambda _, data: decode(data, self.size)))

    def views(self, index: Tensor, cut: Callable[[int, Image.Image], list[np.ndarray]]) -> list[Tensor]:
        """Return views of the stored images, (k, 3, s, s) uint8 each.

        Args:
            index: (k,) places in the set.
            cut: (place in `index`, the image) -> its views, (s, s, 3) uint8 each.
        """
        found = self._map(index, lambda place, data: cut(place, open_rgb(data)))
        return [_stacked(views) for views in zip(*found, strict=True)]

    def split(self, size: int) -> Iterator[Tensor]:
        """Return an iterator over decoded parts (k, 3, size, size).

        Args:
            size: images of a part, >= 1.
        """
        for start in range(0, len(self), size):
            yield self[slice(start, start + size)]

    def _map(self, index: Tensor | slice, use: Callable[[int, bytes], T]) -> list[T]:
        """Apply `use` to (place in `index`, bytes) of each image, in parallel."""
        rows = self.rows[index].tolist()
        return list(in_parallel(lambda place: self._one(rows[place], partial(use, place)), range(len(rows))))

    def _one(self, row: int, use: Callable[[bytes], T]) -> T:
        for place in self._in_turn(row):
            if place in self.skipped:
                continue
            found = attempt(partial(self.read, place), use)
            if not isinstance(found, str):
                return found
            message = f"{self.names[place]} ({found})"
            if self.on_corrupt == "refuse":
                raise DataError(
                    f"{describe([message], len(self.names))}. Repair or remove it, "
                    "or set vision.data.on_corrupt = 'skip'."
                )
            if self.skipped.setdefault(place, message) is message:
                warn(f"replaced an image file that cannot be decoded: {message}")
        raise DataError(f"none of {counted(len(self.names), 'image file')} can be decoded.")

    def _in_turn(self, row: int) -> Iterator[int]:
        """Yield a place in `names`, then those of its class that may replace it, then all others."""
        yield row
        later = [range(row + 1, len(self.names)), range(row)]
        if self.labels is not None and not (self.stream and self.stream.forward):
            yield from (place for place in chain(*later) if self.labels[place] == self.labels[row])
        yield from chain(*later)

    def sample(self, count: int) -> Tensor:
        """Decode some images spread over the set, (k, 3, size, size). A forward-only stream gives its first ones.

        Args:
            count: about how many.
        """
        return self[self._spread(count)]

    def _spread(self, count: int) -> Tensor:
        if self.stream is not None and self.stream.forward:
            return self.rows.argsort()[:count]
        return torch.arange(0, len(self), max(1, len(self) // count))

    def fingerprint(self) -> str:
        """sha256 of the names and of the encoded bytes of 1,000 images spread over the set (`sample`)."""
        digest = hashlib.sha256(str(tuple(self.shape)).encode())
        digest.update("\n".join(os.path.basename(self.names[row]) for row in self.rows.tolist()).encode())
        for row in self.rows[self._spread(PROBED)].tolist():
            data = attempt(partial(self.read, row), bytes)
            if isinstance(data, bytes):  # an unreadable file enters by its name only
                digest.update(data)
        return digest.hexdigest()


def _stacked(images: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
