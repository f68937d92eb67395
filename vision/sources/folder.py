"""Folders of image files."""

from pathlib import Path

import torch

from dipole.core.ground.errors import DataError
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.images import decode_all

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


@register_source("a folder of images", matches=lambda text, path: path.is_dir(), general=True)
def image_folder(source: str, options: Decoding, wanted: Classes) -> Source:
    """A folder of images per class, or such folders per split (train/CLASS/x.jpg); loose images are unlabelled."""
    path = Path(source).expanduser()
    folders = sorted(child.name for child in path.iterdir() if child.is_dir())
    nested = [name for name in folders if any(grand.is_dir() for grand in (path / name).iterdir())]
    # A folder of splits: its folders hold folders, or are named as splits are.
    splits = tuple(nested or [name for name in folders if name in ("train", "test", "val", "validation", "unlabeled")])
    if not splits:
        return Source(str(path), ("train",), lambda _: _read_folder(path, options, wanted))
    return Source(str(path), splits, lambda split: _read_folder(path / split, options, wanted))


def _read_folder(path: Path, options: Decoding, wanted: Classes) -> ImageSet:
    classes = sorted(child.name for child in path.iterdir() if child.is_dir())
    if wanted is not None and classes:
        missing = [name for name in wanted if name not in classes]
        if missing:
            raise DataError(f"{path} lacks {len(missing)} classes of the class list: {', '.join(missing[:5])}.")
        classes = list(wanted)
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate([path / name for name in classes] or [path]):
        found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
        files += found
        labels += [label if classes else -1] * len(found)
    if not files:
        raise DataError(
            f"the folder {path} holds no images ({', '.join(sorted(SUFFIXES))}). "
            "Expected one folder per class (CLASS/file.jpg), split folders (train/CLASS/file.jpg), or loose images."
        )
    return decode_all(
        path.name,
        [str(file) for file in files],
        lambda i: files[i].read_bytes(),
        torch.tensor(labels) if classes else None,
        tuple(classes),
        options,
    )
