"""Arrays in an .npz file."""

from pathlib import Path

import numpy as np
import torch

from dipole.core.utils.errors import DataError
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.images import select


@register_source("an .npz of arrays", matches=lambda text, path: path.suffix == ".npz", quick=True)
def open_npz(source: str, options: Decoding, wanted: Classes) -> Source:
    return Source(source, ("train",), lambda _: select(read_npz(Path(source).expanduser()), wanted))


def read_npz(path: Path) -> ImageSet:
    """Read an .npz with `images` uint8 (n, H, W[, C]) and, optionally, `labels` (n,) and `class_names`."""
    if not path.is_file():
        raise DataError(f"no file {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files if key in ("images", "labels", "class_names")}
    except Exception as error:  # a damaged archive fails in zlib, zipfile or numpy, each with its own type
        raise DataError(f"{path} cannot be read as an .npz archive: {error}.") from error
    images = arrays.get("images")
    if images is None:
        raise DataError(f"{path} has no array 'images'; expected images (n, H, W, C) uint8, labels (n,), class_names.")
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"{path}: images must be uint8 of shape (n, H, W) or (n, H, W, C), got {images.dtype} {images.shape}."
        )
    if images.ndim == 3:
        images = images[..., None]
    labels = arrays.get("labels")
    if labels is not None and (labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer)):
        raise DataError(f"{path}: labels must be integers of shape (n,), got {labels.dtype} {labels.shape}.")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    classes = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    return ImageSet(path.stem, pixels, classes, tuple(map(str, arrays.get("class_names", ()))))
