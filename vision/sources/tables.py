"""Tables that name image files, or hold images, in a column: .csv, .tsv, .jsonl, .json."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import CSV, JSON, ends_with, located_rows, require_columns
from dipole.vision.decoding import file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Source, register_source
from dipole.vision.sources.huggingface import IMAGES, SETTING
from dipole.vision.sources.images import decode_all, select
from dipole.vision.sources.labels import labels_of
from dipole.vision.sources.metadata import NAME, READER, warn_of_splits
from dipole.vision.sources.streamed import fetched

UTF8 = "utf-8"
FILES = (*IMAGES, NAME, "filename", "file", "path")
"""Names of columns of image files, in order of preference."""
LONGEST_NAME = 255  # characters of a part of a path; longer text is an image in base64
ADDRESS = re.compile(r"data:|[a-zA-Z][a-zA-Z0-9+.-]+://")
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
        items: list[str] = []
        rows: list[dict[str, Any]] = []
        for where, row in located_rows(str(path), split, UTF8, READER):
            lower = {name.lower(): name for name in row} if isinstance(row, dict) else {}
            column = options.image_column or next((lower[name] for name in FILES if name in lower), FILES[0])
            require_columns(row, [column], where, f" Set {SETTING}.")
            image = image_in(row[column], column, where, path.parent)
            items.append(f"{path.stem}[{len(rows)}]")
            if isinstance(image, Path):
                items[-1] = os.path.relpath(image, path.parent)
            images.append(image)
            rows.append(row)
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
    if ADDRESS.match(text) or max(map(len, Path(text).parts)) > LONGEST_NAME:
        raise DataError(
            f"{where}: column {name!r} holds {text[:40]!r}, expected the path of an image. Fetch or decode the images "
            "first (base64.b64decode), and give their paths, or their bytes in a parquet file."
        )
    path = Path(text)
    with suppress(RuntimeError):  # no such user
        path = path.expanduser()
    return folder / path
