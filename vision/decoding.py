"""Images that stay encoded and are decoded in parallel when they are needed: sets larger than memory."""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dipole.core.ground.errors import DataError
from dipole.core.ground.transfer import prefetched as prefetched  # earlier versions had it here

OnCorrupt = Literal["refuse", "skip"]
PROBED = 1000  # images whose bytes enter the fingerprint


def decode(data: bytes, size: int | None) -> np.ndarray:
    """Decode one image to uint8 (H, W, 3): short side to `size` and the centred square, or as it is without a size."""
    with Image.open(io.BytesIO(data)) as image:
        if size is not None:
            image.draft("RGB", (size, size))  # JPEG: decode at a fraction of the resolution where that suffices
        picture = image.convert("RGB")
    if size is not None and picture.size != (size, size):
        width, height = picture.size
        side = min(width, height)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(picture)


def attempt(data: Callable[[], bytes], size: int | None) -> np.ndarray | str:
    """The decoded image, or why there is none."""
    try:
        return decode(data(), size)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        return str(error).partition(": <")[0] or type(error).__name__


def describe(broken: Sequence[str], total: int) -> str:
    """How many files are broken, and the first of them."""
    shown = "; ".join(broken[:5]) + (f"; and {len(broken) - 5} more" if len(broken) > 5 else "")
    return f"{len(broken)} of {total} image files cannot be decoded: {shown}"


@dataclass(frozen=True, eq=False)
class Encoded:
    """n images by name; `self[index]` decodes some of them in parallel to uint8 (k, 3, size, size).

    A file that cannot be decoded is refused when it is met, or named in `skipped` and replaced by the next one that can
    be (of the same class, but at the border of two).
    """

    names: Sequence[str]
    read: Callable[[int], bytes]
    rows: Tensor  # (n,) which of `names` belong to this set
    size: int
    on_corrupt: OnCorrupt = "refuse"
    skipped: list[str] = field(default_factory=list)

    dtype = torch.uint8
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), 3, self.size, self.size))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Tensor) -> "Encoded":
        """A part of the set; nothing is decoded."""
        return replace(self, rows=self.rows[index])

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        wanted = self.rows[index].tolist()
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            images = list(pool.map(self._one, wanted))
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()

    def split(self, size: int) -> Iterator[Tensor]:
        """Decoded parts of `size` images, one at a time."""
        for start in range(0, len(self), size):
            yield self[slice(start, start + size)]

    def _one(self, row: int) -> np.ndarray:
        for offset in range(len(self.names)):
            place = (row + offset) % len(self.names)
            found = attempt(partial(self.read, place), self.size)
            if not isinstance(found, str):
                return found
            message = f"{self.names[place]} ({found})"
            if self.on_corrupt == "refuse":
                raise DataError(
                    f"{describe([message], len(self.names))}. Repair or remove it, "
                    "or set vision.data.on_corrupt = 'skip'."
                )
            if message not in self.skipped:
                self.skipped.append(message)
                warnings.warn(f"replaced an image file that cannot be decoded: {message}", stacklevel=2)
        raise DataError(f"none of {len(self.names)} image files can be decoded.")

    def fingerprint(self) -> str:
        """sha256 of the names and of the encoded bytes of 1,000 images spread over the set."""
        digest = hashlib.sha256(str(tuple(self.shape)).encode())
        rows = self.rows.tolist()
        digest.update("\n".join(os.path.basename(self.names[row]) for row in rows).encode())
        for row in rows[:: max(1, len(rows) // PROBED)]:
            digest.update(self.read(row))
        return digest.hexdigest()
