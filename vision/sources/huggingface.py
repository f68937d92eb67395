"""Data sets of the library `datasets`: on the Hub, saved to disk, or as parquet files."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.errors import DataError
from dipole.core.utils.hub import without_retry_messages
from dipole.vision.decoding import file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import HUB, Classes, Decoding, Known, Source, register_source
from dipole.vision.sources.images import decode_all, wanted_rows

LABELS = ("label", "fine_label", "labels", "class", "target", "y")
IDS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "stl10": "jxie/stl10"}
SIZES = {
    "cifar10": Known(3, 32, 10, {"train": 50_000, "test": 10_000}),
    "cifar100": Known(3, 32, 100, {"train": 50_000, "test": 10_000}),
    "stl10": Known(3, 96, 10, {"train": 5000, "test": 8000, "unlabeled": 100_000}, frozenset({"unlabeled"})),
}


def hub_name(source: str) -> str:
    """Return the name that the library `datasets` knows."""
    return IDS.get(source.removeprefix(HUB), source.removeprefix(HUB))


def is_hub_id(source: str, path: Path) -> bool:
    if source.startswith(HUB):
        return True
    is_id = source.count("/") == 1 and not path.is_absolute() and not source.startswith(".")
    return (source in IDS or is_id) and not path.exists()


def loaded(failure: str, load: Callable[[], Any]) -> Any:
    """Return what `load` returns. Errors become DataErrors: {error} and {kind} in `failure` are their text and type."""
    try:
        with without_retry_messages():
            return load()
    except DataError:
        raise
    except Exception as error:  # `datasets` raises many types
        message = failure.replace("{kind}", type(error).__name__).replace("{error}", str(error)[:300])
        raise DataError(message) from error


@register_source("a Hub id owner/name or hub:NAME", names=tuple(IDS), matches=is_hub_id, general=True, known=SIZES)
def hub(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a data set of the Hugging Face Hub, or of its cache when offline."""
    from datasets import get_dataset_split_names, load_dataset

    name = hub_name(source)
    splits = loaded(
        f"the data set {name!r} cannot be found on the Hub or in its cache ({{kind}}). "
        "Check the name and the connection, or give a local folder, .npz or parquet file as vision.data.source."
        f"{how_to_get(source.removeprefix(HUB))}",
        lambda: get_dataset_split_names(name),
    )

    def read(split: str) -> ImageSet:
        failure = f"split {split!r} of the data set {name!r} cannot be loaded: {{error}}."
        return from_table(name, loaded(failure, lambda: load_dataset(name, split=split)), options, wanted)

    return Source(name, tuple(splits), read)


def _is_saved(source: str, path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


@register_source("a folder that save_to_disk wrote", matches=_is_saved)
def saved_dataset(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a folder written by `save_to_disk`: a Dataset (split 'train') or a DatasetDict."""
    from datasets import DatasetDict, load_from_disk

    path = Path(source).expanduser()
    found = loaded(f"{path} cannot be read as a data set saved to disk: {{error}}.", lambda: load_from_disk(str(path)))
    splits = dict(found) if isinstance(found, DatasetDict) else {"train": found}
    return Source(
        str(path), tuple(map(str, splits)), lambda split: from_table(path.name, splits[split], options, wanted)
    )


def _is_parquet(source: str, path: Path) -> bool:
    return path.suffix == ".parquet" or (path.is_dir() and next(path.rglob("*.parquet"), None) is not None)


@register_source("a parquet file or a folder of them", matches=_is_parquet)
def parquet(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open parquet files in the Hub's layout; file names tell the splits (train-00000-of-00001.parquet)."""
    path = Path(source).expanduser()
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise DataError(f"no parquet file at {path}.")
    splits: dict[str, list[str]] = {}
    for file in files:
        split = "train" if path.is_file() else file.stem
        if "-" in file.name:
            split = file.name.partition("-")[0]
        splits.setdefault(split, []).append(str(file))

    def read(split: str) -> ImageSet:
        from datasets import load_dataset

        table = loaded(
            f"{path} cannot be read as parquet: {{error}}.",
            lambda: load_dataset("parquet", data_files={"train": splits[split]}, split="train"),
        )
        return from_table(path.stem, table, options, wanted)

    return Source(str(path), tuple(splits), read)


def columns_of(name: str, features: Any) -> tuple[str, str | None, tuple[str, ...]]:
    """Return the column of images, the column of labels if there is one, and the names of the classes."""
    from datasets import ClassLabel
    from datasets import Image as ImageFeature

    images = [key for key, feature in features.items() if isinstance(feature, ImageFeature)]
    # Parquet without the Hub's metadata: a struct of bytes and path.
    images += [key for key, feature in features.items() if isinstance(feature, dict) and "bytes" in feature]
    if not images:
        raise DataError(f"{name} has no image column; its columns are {', '.join(features)}.")
    labels = [key for key in LABELS if key in features]
    labels += [key for key, feature in features.items() if isinstance(feature, ClassLabel)]
    if not labels:
        return images[0], None, ()
    return images[0], labels[0], tuple(getattr(features[labels[0]], "names", ()))


def undecoded(table: Any, column: str) -> Any:
    """Return a table of `datasets` whose images are bytes or paths."""
    from datasets import Image as ImageFeature

    if isinstance(table.features[column], ImageFeature):
        return table.cast_column(column, ImageFeature(decode=False))
    return table


def from_table(name: str, table: Any, options: Decoding, wanted: Classes) -> ImageSet:
    """Read a `datasets` table with a column of images."""
    column, label, names = columns_of(name, table.features)
    labels = None
    if label is not None:
        labels = integers(name, label, table[label])
    if wanted is not None and labels is not None:
        rows, labels = wanted_rows(name, labels, names, wanted)
        table, names = table.select(rows.tolist()), wanted
    table = undecoded(table, column)

    def read(i: int) -> bytes:
        cell = table[i][column]
        if cell["bytes"] is not None:
            return cell["bytes"]
        return file_bytes(Path(cell["path"]))

    return decode_all(name, [f"{name}[{i}]" for i in range(len(table))], read, labels, names, options)


def integers(name: str, column: str, values: Iterable[Any]) -> Tensor:
    """Convert labels to (n,) integers, -1 where missing."""
    try:
        return torch.tensor([-1 if value is None else int(value) for value in values])
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: the label column {column!r} must hold integers or class labels: {error}.") from error
