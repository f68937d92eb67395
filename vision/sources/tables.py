"""Tables that name image files, or hold images, in a column: .csv, .tsv, .jsonl, .json.

Also tables in a folder of images, as the library `datasets` reads them: metadata.csv, .jsonl or .parquet.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.core.utils.files import is_file
from dipole.core.utils.rows import CSV, JSON, Asker, Located, ends_with, located_rows, require_columns
from dipole.core.utils.text import warn
from dipole.vision.decoding import file_bytes, first_names
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.huggingface import IMAGES, SETTING, TINY
from dipole.vision.sources.images import decode_all, select
from dipole.vision.sources.labels import LABELS, labels_of
from dipole.vision.sources.streamed import fetched

UTF8 = "utf-8"
NAME = "file_name"
READER = Asker("vision", "vision.data.train_split")
FILES = (*IMAGES, NAME, "filename", "file", "path")
"""Names of columns of image files, in order of preference."""
LONGEST_NAME = 255  # characters of a part of a path; longer text is an image in base64
NO_PATH = re.compile(r"data:|[a-zA-Z][a-zA-Z0-9+.-]+://|(\d+[ ,]+){9}")  # addresses and pixels
Stored = Path | bytes | None
"""The image of a cell: its file, its bytes, or None if it is missing."""


@register_source(
    "a table of image files (.csv, .jsonl)",
    matches=lambda source, path: not path.is_dir() and ends_with(path, JSON + CSV),
)
def table_of_files(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a table with a column of paths, relative to the table, and if known one of labels."""
    path = Path(source).expanduser()

    def read(split: str) -> ImageSet:
        images: list[Stored] = []
        rows: list[dict[str, Any]] = []
        for where, row in located_rows(str(path), split, UTF8, READER):
            lower = {name.lower(): name for name in row} if isinstance(row, dict) else {}
            column = options.image_column or next((lower[name] for name in FILES if name in lower), FILES[0])
            if "images" in lower and "annotations" in lower:
                raise DataError(f"{where}: an annotation file of COCO is not read. Give the folder of its images.")
            require_columns(row, [column], where, f" Set {SETTING}. Save pixels in columns as an .npz.")
            images.append(image_in(row[column], column, where, path.parent))
            rows.append(row)
        items = [f"{path.stem}[{number}]" for number in range(len(rows))]
        for number, image in enumerate(images):
            if isinstance(image, Path):
                items[number] = os.path.relpath(image, path.parent)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        warn_of_splits(source, rows, options.label_column, "write a table of each, for vision.data.source and test")
        values = {name: [row.get(name) for row in rows] for name in columns}
        labels, names, _ = labels_of(source, columns, values.__getitem__, options.label_column)
        return select(decode_all(path.stem, items, lambda i: content(images[i]), labels, names, options), wanted)

    return Source(source, ("train",), read, True)


def content(image: Stored) -> bytes:
    """Return the bytes of an image. Raise ValueError if it is missing."""
    if image is None:
        raise ValueError("the cell is empty")
    return file_bytes(image) if isinstance(image, Path) else image


def image_in(cell: Any, name: str, where: str, folder: Path) -> Stored:
    """Return the path of a cell's image, or its encoded bytes, or None if it is missing."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
        if isinstance(cell, str) and "://" in cell:  # in a data set of the Hub
            cell = fetched(cell)
    if cell is None or isinstance(cell, bytes):
        return cell or None
    if not isinstance(cell, str):
        raise DataError(f"{where}: column {name!r} holds {type(cell).__name__}, expected the path of an image")
    text = cell.strip()
    if not text:
        return None
    if NO_PATH.match(text) or max(map(len, Path(text).parts)) > LONGEST_NAME:
        raise DataError(
            f"{where}: column {name!r} holds {text[:40]!r}, expected the path of an image. Fetch or decode the images "
            "first (base64.b64decode), and give their paths, or their bytes in a parquet file, or pixels as an .npz."
        )
    path = Path(text)
    with suppress(RuntimeError):  # no such user
        path = path.expanduser()
    return folder / path


Told = tuple[list[Path], Tensor, tuple[str, ...], list[str]]
"""Images, their labels (n,), the names of the classes, and images that no table names, with that reason."""


def read_metadata(tables: Sequence[Path], images: Sequence[Path], options: Decoding) -> Told | None:
    """Read the labels of images from tables. Return None if the tables name no files or have no labels.

    A table has a column `file_name`, relative to its folder, or NAME_file_name for `image_column` = NAME. Rows without
    it are left out with a warning.
    """
    rows: dict[Path, dict[str, Any]] = {}
    again: list[tuple[str, dict[str, Any], Path]] = []
    absent: list[str] = []
    unnamed: dict[Path, str] = {}
    for table in tables:
        for where, row in _rows(table):
            named = _file_column(row, options.image_column)
            if named is None:
                unnamed[table] = first_names(row) if isinstance(row, dict) else type(row).__name__
                continue
            text = str(row[named] or "")
            file = Path(os.path.normpath(table.parent / text))
            if not is_file(file):  # as written on Windows
                file = Path(os.path.normpath(table.parent / text.replace("\\", "/")))
            if rows.setdefault(file, row) != row:
                again.append((where, row, file))
            if not is_file(file):
                absent.append(f"{where}: no file {row[named]!r}")
    for table, has in unnamed.items():
        warn(f"{table} has a row without the column {NAME!r}, only {has}. It is not read")
    if absent and options.on_corrupt == "refuse":
        raise DataError(
            f"{first_names(absent, '; ')}. Names are relative to the table. Correct them, or set "
            "vision.data.on_corrupt = 'skip'."
        )
    of_image = {file: rows.get(Path(os.path.normpath(file))) for file in images}
    files = [file for file, row in of_image.items() if row is not None]
    told = [row for row in of_image.values() if row is not None]
    if not files:
        return None
    columns = list(dict.fromkeys(name for row in told for name in row))
    name, wanted = str(tables[0]), options.label_column
    fix = "move each split to a folder of its name with its own table (train/metadata.csv)"
    warn_of_splits(name, told, wanted, fix)
    labels, names, column = labels_of(name, columns, lambda column: [row.get(column) for row in told], wanted)
    if labels is None or column is None:
        return None
    if unlike := [f"{where}: {file.name!r}" for where, row, file in again if row.get(column) != rows[file].get(column)]:
        raise DataError(f"rows with another label than an earlier row: {first_names(unlike)}. Keep one of each image.")
    others = [f"{file} (not in {tables[0].name})" for file, row in of_image.items() if row is None]
    return files, labels, names, others


def _rows(table: Path) -> Iterator[Located]:
    if table.name != TINY:
        yield from located_rows(str(table), "train", UTF8, READER)
        return
    for number, line in enumerate(table.read_text(encoding=UTF8).splitlines(), 1):
        file, label, *_ = [*line.split("\t"), ""]
        yield f"{table}, line {number}", {NAME: f"images/{file}", LABELS[0]: label}


def warn_of_splits(name: str, rows: Sequence[dict[str, Any]], wanted: str | None, fix: str) -> None:
    """Warn of a column `split` with several values, which is not the column of labels that is `wanted`."""
    splits = {str(row["split"]) for row in rows if row.get("split") is not None}
    if len(splits) > 1 and wanted != "split":
        warn(
            f"the column 'split' of {name} ({first_names(sorted(splits))}) is not read: all images are one split. To "
            f"keep them apart, {fix}"
        )


def _file_column(row: Any, wanted: str | None) -> str | None:
    """Return the column of a row that names the image's file, or None."""
    if not isinstance(row, dict):
        return None
    names = [NAME, *(name for name in row if name.endswith(f"_{NAME}"))]
    if wanted is not None:
        names = [wanted, f"{wanted}_{NAME}"]
    return next((name for name in names if name in row), None)
