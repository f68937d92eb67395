"""Data sets of the library `datasets`: on the Hub, saved to disk, or as parquet files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import as_stored, is_saved, loaded, require_columns
from dipole.core.utils.text import shortened, warn
from dipole.vision.decoding import file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import HUB, LFS, Classes, Decoding, Known, Source, by_split, register_source
from dipole.vision.sources.images import decode_all, wanted_rows
from dipole.vision.sources.labels import labels_of

SETTING = "vision.data.image_column (--column of `dipole embed`)"
TINY = "val_annotations.txt"  # of Tiny-ImageNet: file in the folder images, class, box
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet", TINY)  # in a folder of images
IMAGES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
"""Names of columns of images, in order of preference."""
CAST = "table.cast_column({column!r}, datasets.Image())"
DECODE = "table.map(lambda row: {{{column!r}: base64.b64decode(row[{column!r}])}})"
IDS = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100", "stl10": "jxie/stl10"}
SIZES = {
    "cifar10": Known(3, 32, 10, {"train": 50_000, "test": 10_000}),
    "cifar100": Known(3, 32, 100, {"train": 50_000, "test": 10_000}),
    "stl10": Known(3, 96, 10, {"train": 5000, "test": 8000, "unlabeled": 100_000}, frozenset({"unlabeled"})),
}


def hub_name(source: str) -> str:
    """Return the name that the library `datasets` knows. A local folder may be called cifar10."""
    if Path(source).exists():
        return source
    return IDS.get(source.removeprefix(HUB), source.removeprefix(HUB))


def is_hub_id(source: str, path: Path) -> bool:
    is_id = source in IDS or re.fullmatch(r"[^./][^/]*/[^/]+", source) is not None
    return source.startswith(HUB) or (is_id and not path.exists() and not path.is_absolute())


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

    return Source(name, tuple(splits), read, True)


SAVED = "a folder that save_to_disk wrote"


@register_source(SAVED, matches=lambda source, path: is_saved(path))
def saved_dataset(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a folder written by `save_to_disk`: a Dataset (split 'train') or a DatasetDict."""
    from datasets import DatasetDict, load_from_disk

    path = Path(source).expanduser()
    failure = f"{path} cannot be read as a data set saved to disk: {{error}}. Write it again, with rows."
    found = loaded(failure, lambda: load_from_disk(str(path)).with_format(None))  # a format is saved too
    splits = dict(found) if isinstance(found, DatasetDict) else {"train": found}
    return Source(
        str(path), tuple(map(str, splits)), lambda split: from_table(path.name, splits[split], options, wanted), True
    )


def tables_in(path: Path) -> Iterator[Path]:
    """Iterate over the parquet files of a folder, without metadata and what `dipole embed` writes there."""
    return (file for file in path.rglob("*.parquet") if file.name not in (*METADATA, "features.parquet"))


@register_source(
    "a parquet file or a folder of them",
    matches=lambda source, path: path.suffix.lower() == ".parquet" or any(tables_in(path)),
)
def parquet(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open parquet files in the Hub's layout, where file names tell the splits (train-00000-of-00001.parquet)."""
    path = Path(source).expanduser()
    splits = {"train": [path]}
    if not path.is_file():
        splits = by_split(sorted(tables_in(path)))
    if not splits:
        raise DataError(f"no parquet file at {path}.")

    def read(split: str) -> ImageSet:
        from datasets import load_dataset
        from pyarrow.parquet import read_metadata, read_schema

        failure = f"{path} cannot be read as parquet: {{error}}. If it is damaged, fetch or write it again ({LFS})."
        filled = loaded(failure, lambda: [str(file) for file in splits[split] if read_metadata(file).num_rows])
        if not filled:
            raise DataError(f"{path} holds no row. Choose another file, or write it again if it should have rows.")
        for file, columns in loaded(failure, lambda: [(each, read_schema(each).names) for each in filled]):
            if twice := sorted({name for name in columns if columns.count(name) > 1}):
                raise DataError(f"{file} has several columns of one name: {', '.join(twice)}. Rename all but one.")
        table = loaded(failure, lambda: load_dataset("parquet", data_files={"train": filled}, split="train"))
        return from_table(path.stem, table, options, wanted)

    return Source(str(path), tuple(splits), read, True)


def image_column(name: str, features: Mapping[str, Any], wanted: str | None) -> str:
    """Return the column of images: `wanted`, else one of `IMAGES`, else the first. Raise DataError if there is none."""
    if wanted is not None:
        require_columns(dict(features), [wanted], name, f" Set {SETTING}.")
        if problem := _no_images(wanted, features[wanted]):
            raise DataError(f"{name}: {problem}")
        return wanted
    found = [key for key, feature in features.items() if _is_image(feature)]
    named = [key for each in IMAGES for key in features if key.lower() == each]
    found = found or [key for key in named if not _no_images(key, features[key])]
    if not found:
        problems = [_no_images(key, features[key]) for key in named]
        problems += [_no_images(key, feature) for key, feature in features.items() if _is_list(feature)]
        raise DataError(
            f"{name} has no image column; its columns are {shortened(', '.join(features))}. "
            f"{next(iter(problems), f'Set {SETTING}.')}"
        )
    chosen = next((key for key in named if key in found), found[0])
    if len(found) > 1 and chosen not in named:
        warn(f"{name} has several columns of images: {', '.join(found)}. It reads {chosen!r}. Or set {SETTING}")
    return chosen


def _is_list(feature: Any) -> bool:
    return isinstance(feature, list) or type(feature).__name__ in ("List", "LargeList", "Sequence")


def _is_image(feature: Any) -> bool:
    """Return whether a column holds images, or structs of bytes and path as parquet without the Hub's metadata."""
    return type(feature).__name__ == "Image" or (isinstance(feature, dict) and "bytes" in feature)


def _no_images(column: str, feature: Any) -> str:
    """Say why a column holds no images, and what to do. "" if it holds some."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    kind = getattr(feature, "dtype", None)
    if _is_image(feature) or "binary" in str(kind):
        return ""
    if "string" in str(kind):
        return (
            f"The column {column!r} holds text, not images. Store the images: {CAST.format(column=column)} for paths, "
            f"{DECODE.format(column=column)} for base64."
        )
    if _is_list(feature) and _is_image(inner):
        return f"The column {column!r} holds lists of images. Make a row of each image, or set {SETTING}."
    if _is_list(feature) or type(feature).__name__.startswith("Array"):
        return (
            f"The column {column!r} holds arrays. Store them as images ({CAST.format(column=column)} for lists), or "
            "all of them as `images` uint8 (n, H, W, C) in an .npz."
        )
    return f"The column {column!r} holds {kind or type(feature).__name__}, not images. Set {SETTING}."


def read_labels(
    name: str, features: Mapping[str, Any], values: Callable[[str], Iterable[Any]], wanted: str | None
) -> tuple[Tensor | None, tuple[str, ...], str | None]:
    """Return the labels of a table (n,), -1 where missing, the names of the classes and the column."""
    from datasets import ClassLabel

    classes = [key for key, feature in features.items() if isinstance(feature, ClassLabel)]
    labels, names, column = labels_of(name, list(features), values, wanted, classes)
    if column is None:
        return None, (), None
    kind = getattr(features[column], "feature", features[column])  # of a list of one label
    return labels, tuple(getattr(kind, "names", names)), column


def image_bytes(cell: Any, read: Callable[[str], bytes]) -> bytes:
    """Return the encoded image of a cell: bytes, or a dictionary with "bytes" or "path", which `read` opens."""
    if isinstance(cell, bytes):
        return cell
    told = cell or {}
    if told.get("bytes") is not None:
        return bytes(told["bytes"])
    path = told.get("path")
    if path is None:
        raise ValueError("the cell is empty")
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"its file {path} is missing or unreadable. Store the bytes in the table") from error


def from_table(name: str, table: Any, options: Decoding, wanted: Classes) -> ImageSet:
    """Read a `datasets` table with a column of images."""
    table, column = as_stored(table), image_column(name, table.features, options.image_column)
    labels, names, _ = read_labels(name, table.features, lambda key: table[key], options.label_column)
    if wanted is not None and labels is not None:
        rows, labels = wanted_rows(name, labels, names, wanted)
        table, names = table.select(rows.tolist()), wanted

    def read(i: int) -> bytes:
        return image_bytes(table[i][column], lambda path: file_bytes(Path(path)))

    return decode_all(name, [f"{name}[{i}]" for i in range(len(table))], read, labels, names, options)
