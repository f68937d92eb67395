"""STL-10 as its authors distribute it."""

from pathlib import Path

import numpy as np
import torch

from dipole.core.utils.errors import DataError
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.images import select


@register_source("a folder of STL-10's own files", matches=lambda text, path: (path / "train_X.bin").is_file())
def stl10_binary(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open STL-10 as distributed: {train,test,unlabeled}_X.bin, {train,test}_y.bin, class_names.txt."""
    path = Path(source).expanduser()
    splits = tuple(name for name in ("train", "test", "unlabeled") if (path / f"{name}_X.bin").is_file())
    listed = path / "class_names.txt"
    names: tuple[str, ...] = ()
    if listed.is_file():
        names = tuple(listed.read_text(encoding="utf-8").split())

    def read(split: str) -> ImageSet:
        raw = np.fromfile(path / f"{split}_X.bin", np.uint8)
        if len(raw) % (3 * 96 * 96):
            raise DataError(f"{path / f'{split}_X.bin'} is truncated: {len(raw)} bytes are no multiple of 3 x 96 x 96.")
        images = torch.from_numpy(raw).view(-1, 3, 96, 96).mT.contiguous()  # stored column by column
        labelled = path / f"{split}_y.bin"
        if not labelled.is_file():
            return ImageSet("stl10", images, None, names)
        labels = torch.from_numpy(np.fromfile(labelled, np.uint8).astype(np.int64)) - 1
        return select(ImageSet("stl10", images, labels, names), wanted)

    return Source(str(path), splits, read)
