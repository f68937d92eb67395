"""Vectors of sentences from a trained encoder, as they are evaluated, and read files of sentences."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.train.inference import Embedder, Inputs, check_features
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.extras import install_line
from dipole.text.encode import Normalize, SentenceEncoder

FEATURES = ("encoder", "embedding")
COLUMNS = ("sentence", "text", "content")
BATCH = 4096  # sentences that are read at a time, and sorted by length
STDIN = "-"


class SentenceEmbedder(Embedder):
    """A `SentenceEncoder` for `dipole embed`.

    Args:
        encoder: as it is evaluated.
        features: "encoder": the vectors that are evaluated, scaled as text.normalize says. "embedding": f and g as the
            objective sees them, not scaled.
    """

    batch_size = BATCH

    def __init__(self, encoder: SentenceEncoder, features: str | None = None) -> None:
        self.encoder = encoder
        self.features = check_features(features, FEATURES)

    def read(self, source: str, column: str | None = None) -> Inputs:
        return read_sentences(source, column)

    def vectors(self, rows: list[Any]) -> Tensor:
        scaling: Normalize | None = "none" if self.features == "embedding" else None
        return self.encoder.encode(rows, output="torch", normalize=scaling).float().cpu()


class FunctionEmbedder(Embedder):
    """Sentences by a function, such as another library's `encode`."""

    batch_size = BATCH

    def __init__(self, encode: Callable[[list[str]], Any]) -> None:
        self.encode = encode

    def read(self, source: str, column: str | None = None) -> Inputs:
        return read_sentences(source, column)

    def vectors(self, rows: list[Any]) -> Tensor:
        return torch.as_tensor(np.asarray(self.encode(rows)), dtype=torch.float32)


def read_sentences(source: str, column: str | None = None) -> Inputs:
    """Open sentences: lines of a text file (or of standard input), or a column of .jsonl, .csv, .tsv or .parquet.

    A line is a sentence, an empty one too, so that rows stay in step with the file. A table's own column "id" names its
    rows, which are numbered from 0 otherwise. Files may be packed (.gz).

    Raises:
        DataError: the file is missing, is of another kind, or a row holds no text. The message names it.
    """
    path = Path(source)
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if source != STDIN and not path.is_file():
        raise DataError(f"there is no file {source}; - reads lines of standard input.")
    if source == STDIN or kind in ("txt", "text"):
        if column is not None:
            raise OptionError(f"--column {column}: lines of text have no columns.")
        return Inputs("id", enumerate(_lines(source)))
    if kind not in TABLES:
        raise DataError(f"{source} is no file of sentences: give .txt, .{', .'.join(TABLES)}, or - for standard input.")
    return Inputs("id", _cells(TABLES[kind](path), source, column))


def _opened(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", newline="")


def _lines(source: str) -> Iterator[str]:
    try:
        with sys.stdin if source == STDIN else _opened(Path(source)) as file:
            for line in file:
                yield line.rstrip("\r\n")
    except (UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{source} is no text in UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror or error}") from error


def _json_rows(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(str(path)), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error


def _csv_rows(path: Path) -> Iterator[Any]:
    separator = "\t" if ".tsv" in path.name.lower() else ","
    try:
        with _opened(path) as file:
            yield from csv.DictReader(file, delimiter=separator)
    except (UnicodeDecodeError, EOFError, OSError, csv.Error) as error:
        raise DataError(f"{path} is no table of text in UTF-8: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise DataError(f"{path} needs {error.name}; install it with: {install_line('text')}") from error
    try:
        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {str(error).partition(chr(10))[0]}") from error


TABLES: dict[str, Callable[[Path], Iterator[Any]]] = {
    "jsonl": _json_rows, "csv": _csv_rows, "tsv": _csv_rows, "parquet": _parquet_rows,
}  # fmt: skip


def _cells(rows: Iterable[Any], source: str, column: str | None) -> Iterator[tuple[Any, str]]:
    named: bool | None = None  # whether rows have names of their own: the first one says
    for number, row in enumerate(rows):
        where = f"{source}, row {number + 1}"
        if isinstance(row, str) and column is None:
            yield number, row
            continue
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object with a column of text, got {type(row).__name__}.")
        name = column or next((each for each in COLUMNS if each in row), None)
        if name not in row:
            missing = f"no column {column!r}" if column else f"no column {', '.join(COLUMNS)}"
            raise DataError(f"{where}: {missing}; it has {', '.join(map(str, row))}. Say --column.")
        if not isinstance(row[name], str):
            raise DataError(f"{where}: the column {name!r} holds {type(row[name]).__name__}, not text.")
        named = (row.get("id") is not None) if named is None else named
        if named and row.get("id") is None:
            raise DataError(f"{where}: it has no id, the rows before it have.")
        yield (str(row["id"]) if named else number), row[name]
