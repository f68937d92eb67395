"""Where images come from: the embedded digits, arrays, folders, parquet files, the Hugging Face Hub."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.ground.errors import DataError, nearest
from dipole.core.ground.hub import without_retry_messages
from dipole.vision.data import ImageSet
from dipole.vision.stream import Encoded, OnCorrupt, attempt, describe

HUB = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "stl10": "jxie/stl10"}
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
LABELS = ("label", "fine_label", "labels", "class", "target", "y")


@dataclass(frozen=True)
class Decoding:
    """How encoded images are read: to squares of `size` pixels, what of damaged ones, and how many bytes in memory."""

    size: int | None = None
    on_corrupt: OnCorrupt = "refuse"
    memory: float = 4e9


@dataclass(frozen=True)
class Source:
    """A data set: the names of its splits, and how one is read."""

    name: str
    splits: tuple[str, ...]
    reader: Callable[[str], ImageSet]

    def read(self, split: str) -> ImageSet:
        """Read one split; a source without named splits has the one split 'train'."""
        if split not in self.splits:
            raise DataError(
                f"{self.name} has no split {split!r}.{nearest(split, self.splits)} It has: {', '.join(self.splits)}. "
                "Set vision.data.train_split, test_split or pretrain_split."
            )
        return self.reader(split)


def open_source(source: str, options: Decoding, wanted: tuple[str, ...] | None = None) -> Source:
    """Find out what `source` names. Nothing is decoded before a split is read.

    wanted: the class names to keep, in their order.
    """
    path = Path(source).expanduser()
    if source == "digits":
        return Source("digits", ("train",), lambda _: digits(wanted))
    if path.suffix == ".npz":
        return Source(source, ("train",), lambda _: read_npz(path, wanted))
    if path.is_dir() and (path / "train_X.bin").is_file():
        return stl10_binary(path, wanted)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return saved(path, options, wanted)
    if path.is_dir() and not list(path.rglob("*.parquet")):
        return image_folder(path, options, wanted)
    if path.suffix == ".parquet" or path.is_dir():
        return parquet(path, options, wanted)
    if source in HUB or (source.count("/") == 1 and not path.is_absolute() and not source.startswith(".")):
        return hub(HUB.get(source, source), options, wanted)
    raise DataError(
        f"no data at {source!r}.{nearest(source, ['digits', *HUB])} Give digits, {', '.join(HUB)}, a Hub id "
        "owner/name, or the path of a folder of images, an .npz or a parquet file that exists."
    )


def digits(wanted: tuple[str, ...] | None = None) -> ImageSet:
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn (Alpaydin & Kaynak, UCI, 1998)."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(np.round(bunch.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(bunch.target).long()
    return _select(ImageSet("digits", images, labels, tuple(map(str, range(10)))), wanted)


# --- arrays ---------------------------------------------------------------------------------------------------------


def read_npz(path: Path, wanted: tuple[str, ...] | None = None) -> ImageSet:
    """An .npz with `images` uint8 (n, H, W[, C]) and, if known, `labels` (n,) and `class_names`."""
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
    names = tuple(map(str, arrays.get("class_names", ())))
    return _select(
        ImageSet(
            path.stem,
            torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))),
            None if labels is None else torch.from_numpy(labels.astype(np.int64)),
            names,
        ),
        wanted,
    )


def stl10_binary(path: Path, wanted: tuple[str, ...] | None) -> Source:
    """The folder of STL-10's own distribution: {train,test,unlabeled}_X.bin, {train,test}_y.bin, class_names.txt."""
    splits = tuple(name for name in ("train", "test", "unlabeled") if (path / f"{name}_X.bin").is_file())
    listed = path / "class_names.txt"
    names = tuple(listed.read_text().split()) if listed.is_file() else ()

    def read(split: str) -> ImageSet:
        raw = np.fromfile(path / f"{split}_X.bin", np.uint8)
        if len(raw) % (3 * 96 * 96):
            raise DataError(f"{path / f'{split}_X.bin'} is truncated: {len(raw)} bytes are no multiple of 3 x 96 x 96.")
        images = torch.from_numpy(raw).view(-1, 3, 96, 96).mT.contiguous()  # stored column by column
        labelled = path / f"{split}_y.bin"
        labels = torch.from_numpy(np.fromfile(labelled, np.uint8).astype(np.int64)) - 1 if labelled.is_file() else None
        return _select(ImageSet("stl10", images, labels, names), wanted if labels is not None else None)

    return Source(str(path), splits, read)


# --- encoded images -------------------------------------------------------------------------------------------------


def image_folder(path: Path, options: Decoding, wanted: tuple[str, ...] | None) -> Source:
    """A folder of images per class, or such folders per split (train/CLASS/x.jpg); loose images are unlabelled."""
    folders = sorted(child.name for child in path.iterdir() if child.is_dir())
    nested = [name for name in folders if any(grand.is_dir() for grand in (path / name).iterdir())]
    # A folder of splits: its folders hold folders, or are named as splits are.
    splits = tuple(nested or [name for name in folders if name in ("train", "test", "val", "validation", "unlabeled")])
    if not splits:
        return Source(str(path), ("train",), lambda _: _read_folder(path, options, wanted))
    return Source(str(path), splits, lambda split: _read_folder(path / split, options, wanted))


def _read_folder(path: Path, options: Decoding, wanted: tuple[str, ...] | None) -> ImageSet:
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


def decode_all(
    name: str,
    items: Sequence[str],
    read: Callable[[int], bytes],
    labels: Tensor | None,
    class_names: tuple[str, ...],
    options: Decoding,
) -> ImageSet:
    """Decode images in parallel to one tensor; a file that cannot be decoded is named, and refused or skipped.

    A set that would take more than `options.memory` bytes stays encoded and is decoded batch by batch.
    """
    size = options.size
    if not items:
        raise DataError(f"{name} holds no images.")
    first = next((found for i in range(len(items)) if not isinstance(found := _attempt(read, i, size), str)), None)
    if first is not None and first.shape[0] == first.shape[1] and first.nbytes * len(items) > options.memory:
        rows = torch.arange(len(items))
        encoded = Encoded(items, read, rows, first.shape[0], options.on_corrupt)
        return ImageSet(name, encoded, labels, class_names)
    images: list[np.ndarray] = []
    kept: list[int] = []
    broken: list[str] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for i, found in enumerate(pool.map(lambda i: _attempt(read, i, size), range(len(items)))):
            if isinstance(found, str):
                broken.append(f"{items[i]} ({found})")
                continue
            if images and found.shape != images[0].shape:
                raise DataError(
                    f"{items[i]} has {found.shape[1]} x {found.shape[0]} pixels, but {items[kept[0]]} "
                    f"{images[0].shape[1]} x {images[0].shape[0]}; set vision.data.size to bring all to one size."
                )
            images.append(found)
            kept.append(i)
    if broken:
        if options.on_corrupt == "refuse" or not images:
            raise DataError(
                f"{describe(broken, len(items))}. Repair or remove them, or set vision.data.on_corrupt = 'skip'."
            )
        warnings.warn(f"skipped {describe(broken, len(items))}", stacklevel=2)
    tensor = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return ImageSet(name, tensor, None if labels is None else labels[kept], class_names, tuple(broken))


def _attempt(read: Callable[[int], bytes], i: int, size: int | None) -> np.ndarray | str:
    return attempt(lambda: read(i), size)


# --- tables ---------------------------------------------------------------------------------------------------------


def parquet(path: Path, options: Decoding, wanted: tuple[str, ...] | None) -> Source:
    """Parquet files as the Hub stores image sets; file names tell the splits (train-00000-of-00001.parquet)."""
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"no parquet file at {path}.")
    groups: dict[str, list[str]] = {}
    for file in files:
        stem = file.name.partition("-")[0] if "-" in file.name else ("train" if path.is_file() else file.stem)
        groups.setdefault(stem, []).append(str(file))

    def read(split: str) -> ImageSet:
        from datasets import Dataset, DatasetDict, load_dataset

        try:
            loaded = load_dataset("parquet", data_files={"train": groups[split]}, split="train")
        except Exception as error:
            raise DataError(f"{path} cannot be read as parquet: {error}.") from error
        assert isinstance(loaded, Dataset | DatasetDict)
        return _from_table(path.stem, loaded, options, wanted)

    return Source(str(path), tuple(groups), read)


def saved(path: Path, options: Decoding, wanted: tuple[str, ...] | None) -> Source:
    """What `save_to_disk` of the library `datasets` wrote: a Dataset (split 'train') or a DatasetDict."""
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path} cannot be read as a data set saved to disk: {error}.") from error
    tables = {str(name): table for name, table in loaded.items()} if isinstance(loaded, DatasetDict) else None
    splits = tables or {"train": loaded}
    return Source(str(path), tuple(splits), lambda split: _from_table(path.name, splits[split], options, wanted))


def hub(name: str, options: Decoding, wanted: tuple[str, ...] | None) -> Source:
    """A data set of the Hugging Face Hub, or of its cache when offline."""
    from datasets import get_dataset_split_names, load_dataset

    try:
        with without_retry_messages():
            splits = tuple(get_dataset_split_names(name))
    except Exception as error:
        raise DataError(
            f"the data set {name!r} cannot be found on the Hub or in its cache ({type(error).__name__}). "
            "Check the name and the connection, or give a local folder, .npz or parquet file as vision.data.source."
        ) from error

    def read(split: str) -> ImageSet:
        try:
            with without_retry_messages():
                table = load_dataset(name, split=split)
        except Exception as error:
            raise DataError(f"split {split!r} of the data set {name!r} cannot be loaded: {error}.") from error
        return _from_table(name, table, options, wanted)

    return Source(name, splits, read)


def _from_table(name: str, table: Any, options: Decoding, wanted: tuple[str, ...] | None) -> ImageSet:
    from datasets import ClassLabel
    from datasets import Image as ImageFeature

    features = table.features
    pictures = [key for key, feature in features.items() if isinstance(feature, ImageFeature)]
    if not pictures:
        # Plain parquet without the Hub's metadata: a struct of bytes and path.
        pictures = [key for key, feature in features.items() if isinstance(feature, dict) and "bytes" in feature]
    if not pictures:
        raise DataError(f"{name} has no image column; its columns are {', '.join(features)}.")
    column = pictures[0]
    named = [key for key, feature in features.items() if isinstance(feature, ClassLabel)]
    label = next((key for key in LABELS if key in features), named[0] if named else None)
    feature = features[label] if label else None
    names = tuple(feature.names) if isinstance(feature, ClassLabel) else ()
    labels = None if label is None else _integers(name, label, table[label])
    if wanted is not None and labels is not None:
        keep = _wanted_rows(name, labels, names, wanted)
        table = table.select(keep[0].tolist())
        labels, names = keep[1], wanted
    raw = table.cast_column(column, ImageFeature(decode=False)) if isinstance(features[column], ImageFeature) else table

    def read(i: int) -> bytes:
        cell = raw[i][column]
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()

    return decode_all(name, [f"{name}[{i}]" for i in range(len(raw))], read, labels, names, options)


def _integers(name: str, column: str, values: Iterable[Any]) -> Tensor:
    try:
        return torch.tensor([-1 if value is None else int(value) for value in values])
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: the label column {column!r} must hold integers or class labels: {error}.") from error


def _wanted_rows(name: str, labels: Tensor, names: Sequence[str], wanted: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Rows of the wanted classes, and their labels in the order of `wanted`."""
    missing = [each for each in wanted if each not in names]
    if missing:
        raise DataError(
            f"{name} lacks {len(missing)} classes of the class list: {', '.join(missing[:5])}."
            f"{nearest(missing[0], names)} It has {len(names)} named classes."
        )
    new = torch.full((len(names) + 1,), -1)
    for label, each in enumerate(wanted):
        new[names.index(each)] = label
    mapped = new[labels]
    rows = (mapped >= 0).nonzero().flatten()
    return rows, mapped[rows]


def _select(images: ImageSet, wanted: tuple[str, ...] | None) -> ImageSet:
    if wanted is None:
        return images
    if images.labels is None:
        raise DataError(f"{images.name} has no labels, so a class list cannot be applied.")
    rows, labels = _wanted_rows(images.name, images.labels, images.class_names, wanted)
    return ImageSet(images.name, images.images[rows], labels, wanted, images.skipped)
