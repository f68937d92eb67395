"""Tables in a folder of images, as the library `datasets` reads them: metadata.csv, .jsonl or .parquet."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.core.utils.files import is_file
from dipole.core.utils.rows import Asker, located_rows
from dipole.core.utils.text import warn
from dipole.vision.decoding import first_names
from dipole.vision.sources.base import Decoding
from dipole.vision.sources.labels import labels_of

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
NAME = "file_name"
READER = Asker("vision", "vision.data.train_split")

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
        for where, row in located_rows(str(table), "train", "utf-8", READER):
            named = file_column(row, options)
            if named is None:
                unnamed[table] = first_names(row) if isinstance(row, dict) else type(row).__name__
                continue
            file = Path(os.path.normpath(table.parent / str(row[named] or "")))
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
    files = [file for file in images if Path(os.path.normpath(file)) in rows]
    told = [rows[Path(os.path.normpath(file))] for file in files]
    columns = list(dict.fromkeys(name for row in told for name in row))
    if not files:
        return None
    name, wanted = str(tables[0]), options.label_column
    fix = "move each split to a folder of its name with its own table (train/metadata.csv)"
    warn_of_splits(name, told, wanted, fix)
    labels, names, column = labels_of(name, columns, lambda column: [row.get(column) for row in told], wanted)
    if labels is None or column is None:
        return None
    if unlike := [f"{where}: {file.name!r}" for where, row, file in again if row.get(column) != rows[file].get(column)]:
        raise DataError(f"rows with another label than an earlier row: {first_names(unlike)}. Keep one of each image.")
    known = set(files)
    others = [f"{file} (not in {tables[0].name})" for file in images if file not in known]
    return files, labels, names, others


def warn_of_splits(name: str, rows: Sequence[dict[str, Any]], wanted: str | None, fix: str) -> None:
    """Warn of a column `split` with several values, which is not the column of labels that is `wanted`."""
    splits = {str(row["split"]) for row in rows if row.get("split") is not None}
    if len(splits) > 1 and wanted != "split":
        warn(
            f"the column 'split' of {name} ({first_names(sorted(splits))}) is not read: all images are one split. To "
            f"keep them apart, {fix}"
        )


def file_column(row: Any, options: Decoding) -> str | None:
    """Return the column of a row that names the image's file, or None."""
    if not isinstance(row, dict):
        return None
    if options.image_column is not None:
        return next((name for name in (options.image_column, f"{options.image_column}_{NAME}") if name in row), None)
    if NAME in row:
        return NAME
    return next((name for name in row if name.endswith(f"_{NAME}")), None)
