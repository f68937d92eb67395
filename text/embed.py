"""Vectors of sentences from a trained encoder, as they are evaluated, and read files of sentences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.train.inference import Embedder, Inputs, chosen_features
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.rows import DAMAGED, KINDS, ROWS, Asker, ends_with, located_rows, open_packed, require_columns
from dipole.core.utils.text import shortened, warn
from dipole.text.corpus import TEXT
from dipole.text.encode import SentenceEncoder
from dipole.text.vocabulary import Tokens

COLUMNS = ("sentence", "text", "content")
BATCH = 4096  # sentences that are read at a time, and sorted by length
STDIN = "-"
LOOKED_AT = 500  # sentences of a batch that are searched for unknown words
NEARLY_ALL, MANY_LOST = 0.8, 0.2  # shares of words and of sentences


class FunctionEmbedder(Embedder):
    """Sentences by a function, such as another library's `encode`."""

    batch_size = BATCH

    def __init__(self, encode: Callable[[list[str]], Any], tokens: Tokens | None = None) -> None:
        """`tokens`: warn of sentences whose words are unknown to this tokenizer."""
        self.encode, self.tokens = encode, tokens

    def read(self, source: str, column: str | None = None) -> Inputs:
        return read_sentences(source, column)

    def vectors(self, rows: list[Any]) -> Tensor:
        if self.tokens is not None and _warns_of_unknown(rows, self.tokens):
            self.tokens = None  # said once
        return torch.as_tensor(np.asarray(self.encode(rows)), dtype=torch.float32)


def sentence_embedder(encoder: SentenceEncoder, features: str | None = None) -> FunctionEmbedder:
    """Return an encoder for `dipole embed`. The features "embedding" are f and g as the objective sees them."""
    scaling = "none" if chosen_features(features, ("encoder", "embedding")) == "embedding" else encoder.normalize
    return FunctionEmbedder(partial(encoder.encode, normalize=scaling), encoder.tokens)


def _warns_of_unknown(rows: Sequence[str], tokens: Tokens) -> bool:
    """Warn if nearly all words are unknown, or many sentences without a known word share one vector."""
    if tokens.unknown is None:
        return False
    texts = [text for text in rows[:: 1 + len(rows) // LOOKED_AT] if text.strip()]
    found = [each.ids for each in tokens.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    unknown = [ids.count(tokens.unknown) for ids in found]
    lost = sum(count == len(ids) for count, ids in zip(unknown, found, strict=True))
    share = sum(unknown) / max(1, sum(map(len, found)))
    if not texts or (share < NEARLY_ALL and lost <= MANY_LOST * len(texts)):
        return False
    warn(
        f"{share:.0%} of the words are unknown to the model. {lost} of {len(texts)} sentences hold no known word, and "
        f"those of equal length get the same vector. The model was trained on another language or kind of text.",
        stacklevel=3,
    )
    return True


def read_sentences(source: str, column: str | None = None) -> Inputs:
    """Open sentences: lines of a text file (or of standard input), or a column of .jsonl, .csv, .tsv or .parquet.

    A line is a sentence, an empty one too, so that rows stay in step with the file. A column "id" names the rows.
    """
    path = Path(source)
    if path.is_dir():
        files = ", ".join(each.name for each in sorted(path.iterdir()) if ends_with(each, (*TEXT, *ROWS)))
        raise DataError(f"{source} is a folder with these files of sentences: {shortened(files) or 'none'}. Give one.")
    if source != STDIN and not path.is_file():
        raise DataError(f"there is no file {source}; - reads lines of standard input.")
    if source == STDIN or ends_with(path, TEXT):
        if column is not None:
            raise OptionError(f"--column {column}: lines of text have no columns.")
        return Inputs("id", enumerate(_lines(source)))
    if not ends_with(path, ROWS):
        raise DataError(f"{source} is no file of sentences: give .txt, {KINDS}, or - for standard input.")
    rows = located_rows(source, "train", "utf-8", Asker("text", "a split"))
    return Inputs("id", _cells(rows, column))


def _lines(source: str) -> Iterator[str]:
    try:
        with nullcontext(sys.stdin) if source == STDIN else open_packed(Path(source), "utf-8-sig") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is no text in UTF-8: {error}. Save it as UTF-8.") from error
    except DAMAGED as error:
        raise DataError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _each(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield rows, of a file that is one array of texts each text."""
    for where, row in rows:
        is_array = isinstance(row, list) and all(isinstance(item, str) for item in row)
        items = row if is_array else [row]
        yield from ((where, item) for item in items)


def _cells(rows: Iterable[tuple[str, Any]], column: str | None) -> Iterator[tuple[Any, str]]:
    has_ids: bool | None = None  # the first row says
    for number, (where, row) in enumerate(_each(rows)):
        if isinstance(row, str) and column is None:
            yield number, row
            continue
        if not isinstance(row, dict):
            require_columns(row, COLUMNS[:1], where)
        name = column or next((each for each in COLUMNS if each in row), COLUMNS[0])
        texts = next((key for key, cell in row.items() if isinstance(cell, str) and key != "id"), "NAME")
        fix = f" Usual are {', '.join(COLUMNS)}. Set --column, such as --column {texts}: one column at a time."
        require_columns(row, [name], where, fix)
        if not isinstance(row[name], str):
            kind = type(row[name]).__name__
            raise DataError(f'{where}: the column {name!r} holds {kind}, not text. Write a text or "".')
        if has_ids is None:
            has_ids = row.get("id") is not None
        if has_ids and row.get("id") is None:
            raise DataError(f"{where}: it has no id, the rows before it have.")
        called = str(row["id"]) if has_ids else number
        yield called, row[name]
