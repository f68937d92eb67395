"""Sources that are arrays: scikit-learn's digits, .npz files, IDX files as of MNIST, and STL-10's own files."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import open_bytes
from dipole.core.utils.text import shortened
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import CALLED, LFS, TRAINING, Classes, Decoding, Known, Source, register_source
from dipole.vision.sources.images import select
from dipole.vision.sources.labels import NoClassesError, class_labels, plain_label

WORDS = {"images": ("images", "image", "x", "data"), "labels": ("labels", "label", "y", "targets", "target")}
"""Words in the names of arrays. Others name the split: train_images (MedMNIST), y_test (Keras), train_X (STL-10)."""
FORMATS = {"idx1", "idx3", "ubyte", "gz", "bin"}  # further words in names of files
Arrays = dict[str, Callable[[], np.ndarray]]
"""What reads an array, by its name."""


@register_source(names=("digits",), known={"digits": Known(1, 8, 10, {"train": 1797})})
def open_digits(source: str, options: Decoding, wanted: Classes) -> Source:
    return Source("digits", ("train",), lambda _: select(digits(), wanted))


def digits() -> ImageSet:
    """Load the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn (Alpaydin & Kaynak, UCI, 1998)."""
    # Its file alone: importing scikit-learn takes a second.
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(path), delimiter=",", dtype=np.int64)
    images = torch.from_numpy(np.round(rows[:, :-1] * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    return ImageSet("digits", images, torch.from_numpy(rows[:, -1]), tuple(map(str, range(10))))


@register_source("an .npz of arrays", matches=lambda text, path: path.suffix.lower() == ".npz", quick=True)
def open_npz(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open an .npz with `images` uint8 (n, H, W[, C]) and, optionally, `labels` (n,) and `class_names`."""
    path = Path(source).expanduser()
    with _readable(path):
        file = np.load(path, allow_pickle=False)
        arrays: Arrays = {name: partial(file.__getitem__, name) for name in file.files}
    return of_arrays(path, arrays, wanted)


@register_source("a folder of MNIST's or STL-10's own files", matches=lambda _, path: bool(files_in(path)))
def open_files(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open train-images-idx3-ubyte, t10k-labels-idx1-ubyte.gz and so on, or train_X.bin, train_y.bin and so on."""
    path = Path(source).expanduser()
    arrays: Arrays = {name: partial(read_file, file) for name, file in files_in(path).items()}
    if (listed := path / "class_names.txt").is_file():
        arrays["class_names"] = lambda: np.array(listed.read_text(encoding="utf-8").split())
    return of_arrays(path, arrays, wanted)


def files_in(folder: Path) -> dict[str, Path]:
    """Return the files of arrays in a folder by name. A packed one is left out if it is there unpacked."""
    patterns = ("*-idx[13]-ubyte*", "raw/*-idx[13]-ubyte*", "*_[Xy].bin")
    found = {file.name: file for pattern in patterns for file in sorted(folder.glob(pattern))}
    return {name: file for name, file in found.items() if not (name.endswith(".gz") and name[:-3] in found)}


def read_file(file: Path) -> np.ndarray:
    """Read a file of MNIST (two zeros, type, number of dimensions, dimensions, bytes) or of STL-10 (bytes)."""
    with open_bytes(file) as opened:
        data = opened.read()
    if file.suffix != ".bin":
        shape = np.frombuffer(data, ">i4", data[3], 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy()
    values = np.frombuffer(data, np.uint8)
    if file.stem.endswith("y"):
        return values.astype(np.int64) - 1
    return values.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)  # stored column by column


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of reading arrays into DataErrors."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"no file {path}.") from None
    except Exception as error:  # a damaged archive fails in zlib, zipfile or numpy, each with its own type
        fix = "Save text as labels.astype(str)" if "Object arrays" in str(error) else f"Fetch or save it again ({LFS})"
        raise DataError(f"{path} cannot be read as arrays: {error}. {fix}.") from error


def of_arrays(path: Path, arrays: Arrays, wanted: Classes) -> Source:
    """Return the splits of arrays, by their names."""
    splits: dict[str, dict[str, str]] = {}
    for kind, words in WORDS.items():
        for name in (name for word in words for name in arrays if word in _words(name)):
            rest = [word for word in _words(name) if word not in words and word not in FORMATS]
            split = "_".join(rest).replace("t10k", "test") or TRAINING[0]
            if split in CALLED:
                splits.setdefault(split, {}).setdefault(kind, name)
    splits = {split: kinds for split, kinds in splits.items() if "images" in kinds}
    if not splits:
        shown = shortened(", ".join(map(repr, arrays)) or "none")
        raise DataError(
            f"{path} has no array 'images', only {shown}. Save it again with images (n, H, W, C) uint8 and, where "
            "known, labels (n,) and class_names: np.savez(FILE, images=..., labels=...)."
        )

    def read(split: str) -> ImageSet:
        names = splits[split] | {name: name for name in arrays if name == "class_names"}
        with _readable(path):
            found = {kind: np.atleast_1d(arrays[name]()) for kind, name in names.items()}
        return select(_image_set(path, found), wanted)

    return Source(str(path), tuple(splits), read)


def _words(name: str) -> list[str]:
    return re.split(r"[-_.]", name.lower())


def _image_set(path: Path, arrays: dict[str, np.ndarray]) -> ImageSet:
    images = arrays["images"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"{path}: images must be uint8 of shape (n, H, W) or (n, H, W, C), got {images.dtype} {images.shape}. Save "
            "images.astype(np.uint8) with values from 0 to 255: 255 * images from [0, 1], images // 257 from 16 bits."
        )
    if images.ndim == 3:
        images = images[..., None]
    height, width, channels = images.shape[1:]
    if height < width == channels or (height <= 4 < channels):
        raise DataError(
            f"{path}: images of shape {images.shape} have their channels first; expected (n, H, W, C). Save "
            "images.transpose(0, 2, 3, 1)."
        )
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    labels, class_names = _classes(path, arrays.get("labels"))
    given = arrays.get("class_names", np.array(())).ravel().tolist()
    class_names = class_names or tuple(str(plain_label(name)) for name in given)
    if len(set(class_names)) < len(class_names):
        raise DataError(f"{path}: 'class_names' has a name twice: {', '.join(class_names)[:200]}. Give each its own.")
    if labels is not None and class_names and int(labels.max()) >= len(class_names):
        raise DataError(f"{path}: the largest label is {int(labels.max())}, and 'class_names' has {len(class_names)}.")
    return ImageSet(path.stem, pixels, labels, class_names)


def _classes(path: Path, labels: np.ndarray | None) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Return labels (n,) of an array (n,) or (n, 1), and the names of classes that are text or large numbers."""
    if labels is None:
        return None, ()
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    try:
        return class_labels(labels.tolist())
    except NoClassesError as error:
        raise DataError(
            f"{path}: the array 'labels', {labels.dtype} {labels.shape}, {error}. Save one class of each image: whole "
            "numbers or text of shape (n,), such as labels.argmax(1) for rows of zeros and one 1. Or leave it out."
        ) from error
