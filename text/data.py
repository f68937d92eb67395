"""The sentences of a run: read from a corpus or a pair table, numbered, and split into training and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dipole.core.train.config import EvaluatedPart
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.machine import processors
from dipole.core.utils.text import counted, warn
from dipole.text.cache import corpus_folder, reading, table_folder
from dipole.text.config import TextSettings
from dipole.text.corpus import Piece, read_pieces
from dipole.text.pair_table import PairLabel, PairTable, read_pairs
from dipole.text.sentences import Cut, Sentences, encode_pieces
from dipole.text.vocabulary import Tokens

TOGETHER = 10_000  # texts of a table that are numbered together
FEW_TOKENS = 1.5  # on average, of sentences that are hardly sentences
LOOKED_AT = 1_000_000  # tokens that are searched for unknown words
MANY_UNKNOWN = 0.5  # share of the words
ANOTHER_TOKENIZER = "Set text.tokenizer to one of the text's language, such as that of a multilingual model."


class Data(ABC):
    """Numbered sentences, or the distinct texts of a table, and their split."""

    row = "sentence"  # what a row is called in messages
    table: PairTable | None = None

    def __init__(self, config: TextSettings, tokens: Tokens, sentences: Sentences) -> None:
        self.config, self.tokens, self.sentences = config, tokens, sentences

    @abstractmethod
    def split(self, part: EvaluatedPart, validation: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows for training, and those of a part for evaluation."""

    @abstractmethod
    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the document of each row, int64."""

    def check(self, batch_size: int, part: EvaluatedPart, validation: float, is_loud: bool) -> None:
        """Refuse data, before training, that cannot be trained on or evaluated. Warn of text without known words."""
        if is_loud:
            self._warn_of_words()
        held = self.split(part, validation)[1]
        if validation and not len(held):
            raise ConfigError(
                f"train.validation_share {validation:g} sets no {self.row} of {self.config.corpus} aside. Raise it, or "
                f"leave train.evaluate_on out"
            )
        if self.count_points(held) == 1:
            raise DataError(
                f"the {part} part of {self.config.corpus}, {counted(len(held), self.row)}, holds one anchor or "
                f"sentence alone, and distances need two. Raise text.held_out (train.validation_share), shuffle the "
                f"rows, or measure on training data with text.held_out = 0."
            )

    def count_points(self, rows: np.ndarray) -> int:
        """Return how many embeddings the geometry of rows is measured on."""
        return len(rows)

    def _warn_of_words(self) -> None:
        """Warn if sentences hold about one token, or if most words are unknown."""
        special = self.tokens.tokenizer.num_special_tokens_to_add(False)
        average = len(self.sentences.tokens) / len(self.sentences) - special
        seen = self.sentences.tokens[:LOOKED_AT]
        unknown = (seen == self.tokens.unknown).sum() / max(1, len(seen) - special * len(seen) / (average + special))
        if average < FEW_TOKENS:
            warn(
                f"{self.config.corpus}: sentences have {average:.1f} tokens on average, so an encoder learns next to "
                f"nothing about word order or meaning. {ANOTHER_TOKENIZER}",
                stacklevel=3,
            )
        if unknown > MANY_UNKNOWN:
            problem = f"{unknown:.0%} of the words are unknown to the tokenizer"
            warn(f"{self.config.corpus}: {problem}. {ANOTHER_TOKENIZER}", stacklevel=3)

    def info(self) -> dict[str, Any]:
        """Return fingerprint and sizes for the record."""
        return {
            "fingerprint": f"{self.sentences.fingerprint}-{self.tokens.fingerprint}",
            "sizes": {"documents": int(self.sentences.document[-1]) + 1},
        }


class RunningText(Data):
    """Documents, whose last sentences are held out."""

    def split(self, part: EvaluatedPart, validation: float) -> tuple[np.ndarray, np.ndarray]:
        bounds = self.sentences.starts
        start, length = bounds[:-1], np.diff(bounds)
        test = start + length - (self.config.held_out * length).astype(np.int64)
        share = self.config.development or validation
        trained = np.maximum(start, test - (share * length).astype(np.int64))
        held = _ranges(trained, test) if part == "validation" else _ranges(test, bounds[1:])
        return _ranges(start, trained), held

    def owners(self, rows: np.ndarray) -> np.ndarray:
        return self.sentences.document[rows].astype(np.int64)

    def check(self, batch_size: int, part: EvaluatedPart, validation: float, is_loud: bool) -> None:
        super().check(batch_size, part, validation, is_loud)
        config = self.config
        if (config.classifiers or config.losses) and len(self.sentences.starts) < 3:
            raise DataError(
                f"{config.corpus} is one document, and text.classifiers and text.losses tell documents apart. Give "
                f"several documents, such as rows or files, or leave both settings out."
            )
        if config.pairs != "window":
            return
        train_rows, held_rows = self.split(part, validation)
        if not self.sentences.has_neighbours(train_rows):
            documents = counted(len(self.sentences.starts) - 1, "document")
            raise DataError(
                f"the corpus {config.corpus} has no two neighbouring sentences for training: of its {documents} with "
                f"{counted(len(self.sentences), 'sentence')} none leaves two. If a row or line is a sentence of one "
                f'long text, set text.unit = "sentences". If rows are unrelated, set text.pairs = "views". Otherwise '
                f"lower text.held_out and text.development."
            )
        if batch_size < 2:
            raise ConfigError("train.batch_size 1 leaves a sentence without its neighbours. Set it to 2 or more")
        if (config.held_out or validation) and is_loud and not self.sentences.has_neighbours(held_rows):
            warn(
                f"of {config.corpus} no two neighbouring sentences are held out: next sentences are not measured, or "
                f"measured on training sentences. Raise text.held_out."
            )


class TableData(Data):
    """Rows of a pair table, whose last rows are held out."""

    row = "row"
    table: PairTable

    def __init__(self, config: TextSettings, tokens: Tokens, sentences: Sentences, table: PairTable) -> None:
        super().__init__(config, tokens, sentences)
        self.table = table

    def split(self, part: EvaluatedPart, validation: float) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(self.table))
        end = len(rows) - int(self.config.held_out * len(rows))
        trained = max(0, end - int(validation * len(rows)))
        held = rows[trained:end] if part == "validation" else rows[end:]
        return rows[:trained], held

    def owners(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), np.int64)

    def count_points(self, rows: np.ndarray) -> int:
        return len(np.unique(self.table.anchor[rows]))

    def info(self) -> dict[str, Any]:
        table = self.table
        filtered = {"rows_without_the_label": table.filtered} if self.config.label is not None else {}
        return {
            "fingerprint": f"{table.fingerprint}-{super().info()['fingerprint']}",
            "sizes": {"texts": len(table.texts)},
            "columns": list(table.columns),
            "incomplete_rows": table.incomplete,
            "rows_with_fewer_negatives": table.fewer,
            **filtered,
        }


@dataclass(frozen=True)
class Probes:
    """The rows that evaluation looks at: numbers of sentences, or of rows of a table."""

    data: Data
    train: np.ndarray
    test: np.ndarray
    has_held_out: bool  # False if `test` are training rows because nothing is held out


def load_data(config: TextSettings, tokens: Tokens | None, max_length: int, rank: int) -> Data:
    """Read and number the corpus or the pair table of a run, without `tokens` by a vocabulary of its own words."""
    config = config.model_copy(update={"max_length": max_length})
    if config.pairs != "columns":
        pieces = read_pieces(
            config.corpus, unit=config.unit, column=config.column, split=config.split, encoding=config.encoding
        )
        return RunningText(config, *_encode(config, tokens, pieces, rank, limit=config.limit))
    with reading(config, rank) as options:
        table = read_pairs(
            config.corpus,
            config.columns,
            split=config.split,
            encoding=config.encoding,
            limit=config.limit,
            folder=table_folder(config),
            label=PairLabel(config.label, config.label_use, config.label_from),
            **options,
        )
    starts = range(0, len(table.texts), TOGETHER)
    texts = (Piece("texts", not n, "\n".join(table.texts[n : n + TOGETHER]), is_lines=True) for n in starts)
    return TableData(config, *_encode(config, tokens, texts, rank, texts_hash=table.texts_hash), table)


def _encode(
    config: TextSettings,
    tokens: Tokens | None,
    pieces: Iterator[Piece],
    rank: int,
    limit: int | None = None,
    texts_hash: str | None = None,
) -> tuple[Tokens, Sentences]:
    with reading(config, rank) as options:
        return encode_pieces(
            pieces,
            Cut(config.max_length, config.lower, tokens),
            vocabulary_size=config.vocabulary_size,
            limit=limit,
            folder=corpus_folder(config, tokens, texts_hash),
            processes=config.processes or processors(),
            **options,
        )


def _ranges(first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return all numbers of the ranges [first, end), one range after another."""
    counts = np.maximum(0, end - first)
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(first - before, counts)
