"""Sources that are arrays: scikit-learn's digits, .npz files, and STL-10 as its authors distribute it."""

from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import shortened
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import LFS, Classes, Decoding, Known, Source, register_source
from dipole.vision.sources.images import select
from dipole.vision.sources.labels import NoClassesError, class_labels, plain_label


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
    return Source(source, ("train",), lambda _: select(read_npz(Path(source).expanduser()), wanted))


def read_npz(path: Path) -> ImageSet:
    """Read an .npz with `images` uint8 (n, H, W[, C]) and, optionally, `labels` (n,) and `class_names`."""
    if not path.is_file():
        raise DataError(f"no file {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ", ".join(map(repr, file.files))
            arrays = {key: np.atleast_1d(file[key]) for key in ("images", "labels", "class_names") if key in file}
    except Exception as error:  # a damaged archive fails in zlib, zipfile or numpy, each with its own type
        fix = "Save text as labels.astype(str)" if "Object arrays" in str(error) else f"Fetch or save it again ({LFS})"
        raise DataError(f"{path} cannot be read as an .npz archive: {error}. {fix}.") from error
    images = arrays.get("images")
    if images is None:
        raise DataError(
            f"{path} has no array 'images', only {shortened(names or 'none')}. Save it again with images (n, H, W, C) "
            "uint8 and, where known, labels (n,) and class_names: np.savez(FILE, images=..., labels=...)."
        )
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
