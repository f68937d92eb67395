"""Images that stay encoded and are decoded in parallel on access: data sets larger than memory, and streams."""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from dipole.core.utils.errors import DataError, ReceivedError
from dipole.core.utils.received import read_bytes
from dipole.core.utils.text import counted, warn

OnCorrupt = Literal["refuse", "skip"]
LARGEST = 2**30
"""Largest image file in bytes."""
MANY_PIXELS = 25_000_000
DENSE = 400  # pixels for a byte
PROBED = 1000  # images whose bytes enter the fingerprint
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Orientation tag of EXIF -> what makes the picture upright. 1 is upright."""
T = TypeVar("T")
Box = tuple[int, int, int, int]  # left, upper, right, lower, as in Pillow


def decode(data: bytes, size: int | None, exact: bool = False) -> np.ndarray:
    """Decode an image to uint8 (H, W, 3). With a size, make it size x size (`centred_box`).

    exact: decode a JPEG at its full resolution.
    """
    picture = open_rgb(data, None if exact else size)
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=centred_box(*picture.size, size))
    return np.asarray(picture)


def centred_box(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return the box (left, top, right, bottom) of an image that is resized to size x size for evaluation.

    The result is that of exported image processors, which resize the shorter side to `size`, round the other down to
    whole pixels, and crop the middle.
    """
    short = min(width, height)
    resized = [size * side // short for side in (width, height)]
    starts = [(side - size) // 2 for side in resized]
    (left, right), (top, bottom) = (
        (start * side / to, (start + size) * side / to)
        for start, side, to in zip(starts, (width, height), resized, strict=True)
    )
    return left, top, right, bottom


def open_rgb(data: bytes, size: int | None = None) -> Image.Image:
    """Open an image as RGB with 8 bits a channel, upright (`upright`).

    A JPEG may be decoded at a lower resolution of at least `size`.
    """
    with Image.open(io.BytesIO(data)) as image:
        check_pixels(image, len(data))
        if size is not None:
            image.draft("RGB", (size, size))
        return upright(eight_bits(image).convert("RGB"), image)


def check_pixels(image: Image.Image, size: int) -> None:
    """Raise ValueError for a small file of `size` bytes that would take gigabytes of memory.

    It has more than `MANY_PIXELS`, and more than `DENSE` for each byte. Photos have at most 100 for a byte.
    """
    pixels = image.width * image.height
    if pixels > MANY_PIXELS and pixels > DENSE * size:
        raise ValueError(
            f"{image.width} x {image.height} pixels in {size} bytes would take gigabytes of memory; save it smaller"
        )


def upright(picture: Image.Image, opened: Image.Image) -> Image.Image:
    """Turn a picture as the orientation tag (EXIF or XMP) of the opened file says, as viewers do."""
    try:
        tag: Any = opened.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged EXIF data say nothing, and the pixels are readable
        return picture
    return picture.transpose(TURNS[tag]) if tag in TURNS else picture


def eight_bits(image: Image.Image) -> Image.Image:
    """Scale a grey image of 16 bits, or of floats in [0, 1], to 256 levels. Return other images unchanged.

    Pillow's own conversion clips such values at 255.

    Raises:
        ValueError: the white level is unknown.
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


def describe(broken: Sequence[str], total: int) -> str:
    """Say how many files are broken, and name the first five."""
    return f"{len(broken)} of {counted(total, 'image file')} cannot be decoded: {shortened(broken, '; ')}"


def shortened(names: Iterable[str], between: str = ", ") -> str:
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
    """n encoded images; `self[index]` decodes some of them in parallel to uint8 (k, 3, size, size).

    A file that cannot be decoded raises an error when it is read. With on_corrupt = "skip" it is named in `skipped` and
    replaced by the next readable image (of the same class, except at the border of two). Random crops are cut from the
    images at their stored resolution (`crops`).

    Args:
        names: of all images of the data set.
        read: place in `names` -> the encoded bytes.
        rows: (n,) the places in `names` that belong to this set.
        size: side of the decoded squares in pixels.
        on_corrupt: "refuse" or "skip".
        skipped: place in `names` -> reason; all parts of a set share it.
        stream: the order for reading; None if images can be read in any order.

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

    def crops(self, index: Tensor, boxes: Callable[[int, int, int], list[Box]], sizes: Sequence[int]) -> list[Tensor]:
        """Cut views from the stored images. A box is cut out before it is resized (bilinear, antialiased).

        Args:
            index: (k,) places in the set.
            boxes: place in `index`, height and width of the image -> the box of each view (left, top, right, bottom).
            sizes: side of each view in pixels.

        Returns:
            (k, 3, s, s) uint8 for each s of `sizes`.
        """

        def cut(place: int, data: bytes) -> list[np.ndarray]:
            picture = open_rgb(data)
            views = []
            for box, size in zip(boxes(place, picture.height, picture.width), sizes, strict=True):
                views.append(np.asarray(picture.crop(box).resize((size, size), Image.Resampling.BILINEAR)))
            return views

        views = self._map(index, cut)
        return [_stacked([view[number] for view in views]) for number in range(len(sizes))]

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
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return list(pool.map(lambda place: self._one(rows[place], partial(use, place)), range(len(rows))))

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
                warn(f"replaced an image file that cannot be decoded: {message}", stacklevel=2)
        raise DataError(f"none of {counted(len(self.names), 'image file')} can be decoded.")

    def sample(self, count: int) -> Tensor:
        """Decode some images spread over the set, (k, 3, size, size). A forward-only stream gives its first ones.

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
        probed = rows[:: max(1, len(rows) // PROBED)]
        if self.stream is not None and self.stream.forward:
            probed = sorted(rows)[:PROBED]
        for row in probed:
            data = attempt(partial(self.read, row), bytes)
            if isinstance(data, bytes):  # an unreadable file enters by its name only
                digest.update(data)
        return digest.hexdigest()


def _stacked(images: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
