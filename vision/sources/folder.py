"""Folders of image files."""

import mimetypes
import os
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from PIL import Image

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import are, counted
from dipole.vision.decoding import file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import SPLITS, Classes, Decoding, Known, Source, register_source
from dipole.vision.sources.images import decode_all

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".j2k", ".jpx"}
)
# Suffixes of further image files that the system's list of types may not know.
PICTURES = frozenset({".avif", ".heic", ".heif", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".exr", ".psd", ".pfm"})


def glance_folder(path: Path) -> Known | None:
    """Count the images of a folder's splits by file names, and read the size of the first image."""
    try:
        splits = {name: path / name for name in _splits(path)} or {"train": path}
        labelled = {name: len(_folders(folder)) for name, folder in splits.items()}
        first = next(chain.from_iterable(map(_images, splits.values())), None)
        if first is None:
            return None
        with warnings.catch_warnings(action="ignore"), Image.open(first) as image:
            side = min(image.size)
        # Files of a folder are read in colour, whatever they are.
        counts = {name: sum(1 for _ in _images(folder)) for name, folder in splits.items()}
    except (OSError, ValueError, Image.DecompressionBombError):  # the reader will report the problem
        return None
    unlabelled = frozenset(name for name, found in labelled.items() if not found)
    return Known(3, side, max(*labelled.values(), 1), counts, unlabelled)


def _images(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders.sort()  # the order of the walk: the first image is the same everywhere
        yield from (Path(place, name) for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES)


@register_source("a folder of images", matches=lambda text, path: path.is_dir(), general=True, glance=glance_folder)
def image_folder(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a folder of images per class, or such folders per split (train/CLASS/x.jpg); loose images are unlabelled."""
    path = Path(source).expanduser()
    folders, splits = _folders(path), _splits(path)
    if not splits:
        return Source(str(path), ("train",), lambda _: _read_folder(path, options, wanted))

    def read(split: str) -> ImageSet:
        left_out = _beside(path, "beside the folders of the splits")
        left_out += tuple(
            f"{path / name} (a folder beside the folders of the splits)" for name in folders if name not in splits
        )
        return _read_folder(path / split, options, wanted, left_out)

    return Source(str(path), splits, read)


def _splits(path: Path) -> tuple[str, ...]:
    """Return the folders that are splits: all if each holds folders, else those named as splits."""
    folders = _folders(path)
    nested = [name for name in folders if _folders(path / name)]
    named = [name for name in folders if name in SPLITS]
    if not named and (not nested or nested != folders):
        return ()
    return tuple(name for name in folders if name in nested or name in named)


def _folders(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _read_folder(path: Path, options: Decoding, wanted: Classes, left_out: tuple[str, ...] = ()) -> ImageSet:
    classes = _folders(path)
    if classes:
        left_out += _beside(path, "beside the folders of the classes")
    if wanted is not None and classes:
        missing = [name for name in wanted if name not in classes]
        if missing:
            raise DataError(
                f"{path} lacks {counted(len(missing), 'class', 'classes')} of the class list: {', '.join(missing[:5])}."
            )
        classes = list(wanted)
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate([path / name for name in classes] or [path]):
        for file in sorted(folder.rglob("*")):
            if file.suffix.lower() in SUFFIXES:
                files.append(file)
                labels.append(label)
            elif is_picture(file):
                left_out += (f"{file} (files {file.suffix} are not read)",)
    if not files:
        others = ""
        if left_out:
            others = f" It holds others: {left_out[0]}."
        raise DataError(
            f"the folder {path} holds no images ({', '.join(sorted(SUFFIXES))}).{others} "
            "Expected one folder per class (CLASS/file.jpg), split folders (train/CLASS/file.jpg), or loose images."
        )
    if left_out:
        more = ""
        if len(left_out) > 5:
            more = f"; and {len(left_out) - 5} more"
        warnings.warn(
            f"{counted(len(left_out), 'image')} of {path.name} {are(len(left_out))} left out: "
            f"{'; '.join(left_out[:5])}{more}",
            stacklevel=2,
        )
    return decode_all(
        path.name,
        [str(file) for file in files],
        lambda i: file_bytes(files[i]),
        torch.tensor(labels) if classes else None,
        tuple(classes),
        options,
        left_out,
    )


def _beside(path: Path, where: str) -> tuple[str, ...]:
    return tuple(f"{file} ({where})" for file in sorted(path.iterdir()) if file.is_file() and is_picture(file))


def is_picture(file: Path) -> bool:
    """Return whether a file has the suffix of an image. It may be unreadable."""
    suffix = file.suffix.lower()
    return suffix in SUFFIXES | PICTURES | _known_to_pillow() or (
        (mimetypes.guess_type(file.name)[0] or "").startswith("image/")
    )


@cache
def _known_to_pillow() -> frozenset[str]:
    found = Image.registered_extensions()
    # Pillow also has plug-ins for documents, films and arrays.
    return frozenset(suffix for suffix, kind in found.items() if kind not in ("PDF", "MPEG", "HDF5", "EPS", "BUFR"))
