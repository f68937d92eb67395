"""Features of image files from a trained encoder, with the preprocessing of its evaluation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dipole.core.train.inference import Embedder, Inputs
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.pictures import open_image
from dipole.vision.decoding import attempt, decode, file_bytes, in_parallel
from dipole.vision.sources import described, open_source, reader_of
from dipole.vision.sources.base import Decoding
from dipole.vision.sources.folder import FOLDER, SUFFIXES, scan

Named = Iterator[tuple[str, Callable[[], bytes] | Tensor]]  # names with images: encoded, or arrays (C, H, W)
AT_ONCE = 64  # images that are decoded in parallel
FEATURES = ("encoder", "embedding")  # the values of vision.probe.features


@dataclass(eq=False)
class ImageEmbedder(Embedder):
    """Image files to features."""

    features: Callable[[Tensor], Tensor]  # of images (n, C, H, W) uint8
    channels: int
    decoded: int | None = None  # side to which the run decodes images, None as stored
    size: int | None = None  # of the views (`centred_box`). None leaves that to `features`
    batch_size: int = 512
    on_corrupt: str | None = "refuse"

    def read(self, source: str, column: str | None = None) -> Inputs:
        """Read one image, all images of a folder and its subfolders by name, or any training source."""
        path = Path(source).expanduser()
        where, files = path.parent, []
        if path.is_dir():
            where, files = path, scan(path).images()
        elif path.is_file() and reader_of(source) is None:
            files = [path]
        images: Named = ((file.relative_to(where).as_posix(), partial(file_bytes, file)) for file in files)
        if not files:
            where, images = Path(), _of_source(source, path, self.decoded, column)
        elif column is not None:
            raise OptionError(f"--column {column}: image files have no columns.")

        def rows() -> Iterator[tuple[str, Tensor]]:
            while some := list(islice(images, AT_ONCE)):
                for (name, _), found in zip(some, in_parallel(self._decode, some), strict=True):
                    if isinstance(found, Tensor):
                        yield name, found
                    elif self.on_corrupt == "skip":
                        self.skipped.append(f"{name} ({found})")
                    else:
                        fix = "Repair it, take it out, or add --on-corrupt skip"
                        if where / name == path:
                            fix = f"Give an image that can be read, or {described()}"
                        raise DataError(f"{where / name} cannot be decoded ({found}). {fix}.")

        return Inputs("path", rows(), len(files) or None)

    def _decode(self, image: tuple[str, Callable[[], bytes] | Tensor]) -> Tensor | str:
        """Return an image for the model, or the reason why it cannot be decoded."""
        name, read = image
        if isinstance(read, Tensor):
            return fit_channels(name, read, self.channels)
        return attempt(read, lambda data: fit_channels(name, view_of(data, self.decoded, self.size), self.channels))

    def vectors(self, rows: list[Any]) -> Tensor:
        places: dict[torch.Size, list[int]] = {}  # images of one size go together
        for place, row in enumerate(rows):
            places.setdefault(row.shape, []).append(place)
        parts = []
        for group in places.values():
            images = torch.stack([rows[place] for place in group])
            parts.append(self.features(images).flatten(1).float().cpu())
        order = torch.tensor([place for group in places.values() for place in group])
        return torch.cat(parts)[order.argsort()]


def _of_source(source: str, path: Path, decoded: int | None, column: str | None) -> Named:
    """Return the images of a training source with their names: encoded, or arrays (C, H, W)."""
    reader = reader_of(source)
    if reader is not None and reader.reads == FOLDER:
        raise DataError(f"the folder {path} holds no images ({', '.join(sorted(SUFFIXES))}).")
    # No memory: the images stay encoded, and are decoded here, one by one.
    opened = open_source(source, Decoding(decoded or 256, memory=0, image_column=column))
    if column is not None and not opened.has_columns:
        raise OptionError(f"--column {column}: {source} has no columns.")

    def found() -> Named:
        for split in opened.splits:
            images = opened.read(split).images
            prefix = f"{split}/" if len(opened.splits) > 1 else ""
            if isinstance(images, Tensor):
                yield from ((f"{prefix}{place}", each) for place, each in enumerate(images))
            else:
                rows = images.rows.tolist()
                yield from ((f"{prefix}{images.names[row]}", partial(images.read, row)) for row in rows)

    return found()


def view_of(data: bytes, decoded: int | None, size: int | None) -> Tensor:
    """Decode an image directly to size x size, as exported image processors do, or a square one as in the run."""
    is_square = False
    if decoded in (None, size):
        with open_image(data) as image:
            is_square = image.width == image.height
    if not is_square:
        decoded = size
    picture = decode(data, decoded, exact=not is_square)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def fit_channels(name: str, image: Tensor, channels: int) -> Tensor:
    """Convert an image (C, H, W) to the channels of a model: grey to colour, or colour to grey (ITU-R BT.601)."""
    if len(image) == channels:
        return image
    if len(image) == 3 and channels == 1:
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")
        return torch.from_numpy(np.array(picture))[None]
    if len(image) != 1:
        raise DataError(
            f"image {name} has {len(image)} channels, and the model reads {channels}. Give arrays of {channels} in an "
            ".npz."
        )
    return image.expand(channels, -1, -1)
