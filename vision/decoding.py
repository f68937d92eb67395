"""Images that stay encoded and are decoded in parallel when they are needed: sets larger than memory, and streams."""

import hashlib
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dipole.core.utils.errors import DataError, ReceivedError
from dipole.core.utils.received import read_bytes
from dipole.core.utils.text import counted

OnCorrupt = Literal["refuse", "skip"]
LARGEST = 2**30
"""Bytes of an image file."""
PROBED = 1000  # images whose bytes enter the fingerprint
T = TypeVar("T")
Box = tuple[int, int, int, int]  # left, upper, right, lower, as Pillow has them


def decode(data: bytes, size: int | None) -> np.ndarray:
    """Decode one image to uint8 (H, W, 3): short side to `size` and the centred square, or as it is without a size."""
    picture = opened(data, size)
    if size is not None and picture.size != (size, size):
        width, height = picture.size
        side = min(width, height)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(picture)


def opened(data: bytes, size: int | None = None) -> Image.Image:
    """An image in RGB, 8 bits a channel; a JPEG may come at a fraction of its resolution where `size` pixels do."""
    with Image.open(io.BytesIO(data)) as image:
        if size is not None:
            image.draft("RGB", (size, size))
        return eight_bits(image).convert("RGB")


def eight_bits(image: Image.Image) -> Image.Image:
    """A grey image of 16 bits, or of numbers in [0, 1], in the 256 levels that others have; others as they are.

    Pillow's own conversion cuts such values off at 255. ValueError where nothing says which value is white.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.float64) / 65535
    elif image.mode == "I":
        raise ValueError("32-bit whole numbers do not say which value is white; save it with 8 or 16 bits a channel")
    elif image.mode == "F":
        values = np.asarray(image).astype(np.float64)
        if not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(
                f"its numbers go from {values.min():g} to {values.max():g}, and floating-point pixels lie in [0, 1]; "
                "scale them, or save it with 8 or 16 bits a channel"
            )
    else:
        return image
    return Image.fromarray(np.round(values.clip(0, 1) * 255).astype(np.uint8))


def file_bytes(path: Path) -> bytes:
    """The content of an image file; OSError for what is none (pipes and devices are not waited for) or too large."""
    try:
        return read_bytes(path, LARGEST)
    except ReceivedError as error:
        raise OSError(error.reason) from None


def attempt(data: Callable[[], bytes], use: Callable[[bytes], T]) -> T | str:
    """What is made of an image's bytes, or why nothing is."""
    try:
        return use(data())
    except DataError:
        raise  # of the whole set, not of this image
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        # Where an object lies in memory says nothing, and is another place each time.
        return re.sub(r"\s*:?\s*<[^>]* at 0x[^>]*>", "", str(error)) or type(error).__name__


def describe(broken: Sequence[str], total: int) -> str:
    """How many files are broken, and the first of them."""
    shown = "; ".join(broken[:5]) + (f"; and {len(broken) - 5} more" if len(broken) > 5 else "")
    return f"{len(broken)} of {counted(total, 'image file')} cannot be decoded: {shown}"


@dataclass(frozen=True, eq=False)
class Stream:
    """How the images of a set follow one another where they are read in their order.

    Args:
        bounds: (shards + 1,) the first image of each shard, and their number.
        buffer: images among which the order is drawn anew.
        forward: whether they can only be read one after another.
    """

    bounds: Tensor
    buffer: int
    forward: bool


@dataclass(frozen=True, eq=False)
class Encoded:
    """n images by name; `self[index]` decodes some of them in parallel to uint8 (k, 3, size, size).

    A file that cannot be decoded is refused when it is met, or named in `skipped` and replaced by the next one that can
    be (of the same class, but at the border of two). Random crops are cut from the images as they are stored (`crops`).

    Args:
        names: of all images of the data set.
        read: place in `names` -> the encoded bytes.
        rows: (n,) which of `names` belong to this set.
        size: side of the decoded squares in pixels.
        on_corrupt: "refuse" or "skip".
        skipped: place in `names` -> what is wrong there; all parts of a set share it.
        stream: how they follow one another; None where any can be read at any time.

    Raises:
        DataError: from reading, an image that cannot be decoded, or none that can.
    """

    names: Sequence[str]
    read: Callable[[int], bytes]
    rows: Tensor  # (n,) which of `names` belong to this set
    size: int
    on_corrupt: OnCorrupt = "refuse"
    skipped: dict[int, str] = field(default_factory=dict)  # by place in `names`; all parts of a set share it
    stream: Stream | None = None

    dtype = torch.uint8
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """(n, 3, size, size), as of a tensor."""
        return torch.Size((len(self.rows), 3, self.size, self.size))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Tensor) -> "Encoded":
        """A part of the set; nothing is decoded.

        Args:
            index: (k,) places in it.
        """
        return replace(self, rows=self.rows[index])

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        return _stacked(self._all(index, lambda _, data: decode(data, self.size)))

    def crops(self, index: Tensor, boxes: Callable[[int, int, int], list[Box]], sizes: Sequence[int]) -> list[Tensor]:
        """Views cut from images as they are stored, (k, 3, s, s) uint8 for each s of `sizes`.

        A box is cut out before it is resized (bilinear, antialiased), so that nothing outside of it is read: Pillow's
        and torchvision's crop.

        Args:
            index: (k,) places in the set.
            boxes: place in `index`, height and width of the image -> the box of each view (left, top, right, bottom).
            sizes: side of each view in pixels.
        """

        def cut(place: int, data: bytes) -> list[np.ndarray]:
            picture = opened(data)
            found = zip(boxes(place, picture.height, picture.width), sizes, strict=True)
            return [
                np.asarray(picture.crop(box).resize((size, size), Image.Resampling.BILINEAR)) for box, size in found
            ]

        views = self._all(index, cut)
        return [_stacked([view[number] for view in views]) for number in range(len(sizes))]

    def split(self, size: int) -> Iterator[Tensor]:
        """Decoded parts, (k, 3, size, size) each, one at a time.

        Args:
            size: images of a part, >= 1.
        """
        for start in range(0, len(self), size):
            yield self[slice(start, start + size)]

    def _all(self, index: Tensor | slice, use: Callable[[int, bytes], T]) -> list[T]:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(lambda each: self._one(each[1], partial(use, each[0])), self._wanted(index)))

    def _wanted(self, index: Tensor | slice) -> list[tuple[int, int]]:
        return list(enumerate(self.rows[index].tolist()))

    def _one(self, row: int, use: Callable[[bytes], T]) -> T:
        for offset in range(len(self.names)):
            place = (row + offset) % len(self.names)
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
                warnings.warn(f"replaced an image file that cannot be decoded: {message}", stacklevel=2)
        raise DataError(f"none of {counted(len(self.names), 'image file')} can be decoded.")

    def sample(self, count: int) -> Tensor:
        """Some images spread over the set, decoded, (k, 3, size, size); the first where images come one after another.

        Args:
            count: about how many.
        """
        if self.stream is not None and self.stream.forward:
            return self[self.rows.argsort()[:count]]
        return self[slice(None, None, max(1, len(self) // count))]

    def fingerprint(self) -> str:
        """sha256 of the names and of the encoded bytes of 1,000 images spread over the set (`sample`)."""
        digest = hashlib.sha256(str(tuple(self.shape)).encode())
        rows = self.rows.tolist()
        digest.update("\n".join(os.path.basename(self.names[row]) for row in rows).encode())
        forward = self.stream is not None and self.stream.forward
        for row in sorted(rows)[:PROBED] if forward else rows[:: max(1, len(rows) // PROBED)]:
            data = attempt(partial(self.read, row), bytes)
            digest.update(b"" if isinstance(data, str) else data)  # of a file that cannot be read there is the name
        return digest.hexdigest()


def _stacked(images: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
