"""Folders of image files."""

import mimetypes
import warnings
from pathlib import Path

import torch

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import are, counted
from dipole.vision.decoding import file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import SPLITS, Classes, Decoding, Source, register_source
from dipole.vision.sources.images import decode_all

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".j2k", ".jpx"}
)
# Suffixes of further image files that the system's list of types may not know.
PICTURES = frozenset({".avif", ".heic", ".heif", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".exr", ".psd", ".pfm"})


@register_source("a folder of images", matches=lambda text, path: path.is_dir(), general=True, quick=True)
def image_folder(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a folder of images per class, or such folders per split (train/CLASS/x.jpg); loose images are unlabelled.

    Folders are splits if each of them holds folders, or if they are named as splits.
    """
    path = Path(source).expanduser()
    folders = _folders(path)
    nested = [name for name in folders if _folders(path / name)]
    named = [name for name in folders if name in SPLITS]
    if not named and (not nested or nested != folders):
        return Source(str(path), ("train",), lambda _: _read_folder(path, options, wanted))
    splits = tuple(name for name in folders if name in nested or name in named)

    def read(split: str) -> ImageSet:
        where = "beside the folders of the splits"
        others = [f"{path / name} (a folder {where})" for name in folders if name not in splits]
        return _read_folder(path / split, options, wanted, [*_loose(path, where), *others])

    return Source(str(path), splits, read)


def _folders(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _read_folder(path: Path, options: Decoding, wanted: Classes, left_out: list[str] | None = None) -> ImageSet:
    left_out = left_out or []
    classes = _folders(path)
    if classes:
        left_out += _loose(path, "beside the folders of the classes")
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
                left_out.append(f"{file} (files {file.suffix} are not read)")
    if not files:
        others = f" It holds others: {left_out[0]}." if left_out else ""
        raise DataError(
            f"the folder {path} holds no images ({', '.join(sorted(SUFFIXES))}).{others} "
            "Expected one folder per class (CLASS/file.jpg), split folders (train/CLASS/file.jpg), or loose images."
        )
    if left_out:
        more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        warnings.warn(
            f"{counted(len(left_out), 'image')} of {path.name} {are(len(left_out))} left out: "
            f"{'; '.join(left_out[:5])}{more}",
            stacklevel=2,
        )
    names = [str(file) for file in files]
    found = torch.tensor(labels) if classes else None
    return decode_all(path.name, names, lambda i: file_bytes(files[i]), found, tuple(classes), options, left_out)


def _loose(path: Path, where: str) -> list[str]:
    return [f"{file} ({where})" for file in sorted(path.iterdir()) if file.is_file() and is_picture(file)]


def is_picture(file: Path) -> bool:
    """Return whether a file has the suffix of an image. It may be unreadable."""
    kind = mimetypes.guess_type(file.name)[0] or ""
    return file.suffix.lower() in SUFFIXES | PICTURES or kind.startswith("image/")
