"""Parts of a corpus as numbers: made of pieces of text one by one, in this process or in others, kept in files."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.utils.files import atomic_file
from dipole.text.corpus import Piece, sentences_of
from dipole.text.vocabulary import Tokens
from dipole.text.words import WordIds

TOGETHER = 500_000  # characters whose sentences are numbered together: their words are held as strings
SHARD = 8_000_000  # characters of a shard


@dataclass(frozen=True)
class Shard:
    """Sentences as numbers, and the words that the numbers stand for until there is a vocabulary.

    tokens: (T,) int32, ids of a tokenizer, or places in `words`. lengths: (n,) int32, of the sentences.
    document: (n,) int32. words, counts: (m,) and how often each comes; none where tokens are ids.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    document: np.ndarray
    words: tuple[str, ...] = ()
    counts: np.ndarray | None = None

    def save(self, path: Path) -> None:
        """Write a file, whole or not at all."""
        arrays = {"tokens": self.tokens, "lengths": self.lengths, "document": self.document}
        if self.counts is not None:
            text = "\n".join(self.words).encode("utf-8", "surrogatepass")
            arrays |= {"words": np.frombuffer(text, np.uint8), "counts": self.counts}
        with atomic_file(path) as file:
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> "Shard":
        """Read a file; one that was damaged raises any of a number of exceptions (`cache.found`)."""
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
        shard = cls(found["tokens"], found["lengths"], found["document"])
        if "counts" in found:
            text = found["words"].tobytes().decode("utf-8", "surrogatepass")
            shard = cls(*shard.arrays, tuple(text.split("\n")) if text else (), found["counts"])
        if len(shard.words) != (0 if shard.counts is None else len(shard.counts)):
            raise ValueError("words without a count")
        return shard

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.tokens, self.lengths, self.document


@dataclass(frozen=True)
class Task:
    """The pieces of a shard: its number, that of the document before, each piece's start and content."""

    number: int
    before: int  # -1 at the start of the corpus
    pieces: tuple[tuple[bool, str | list[str]], ...]
    most: int | None = None
    """Sentences that are taken at most."""

    @property
    def characters(self) -> int:
        return sum(map(_size, (content for _, content in self.pieces)))


def tasks_of(pieces: Iterable[Piece], size: int = SHARD) -> Iterator[Task]:
    """Put pieces together to shards; which ones depends on the pieces alone."""
    document = before = -1
    together: list[tuple[bool, str | list[str]]] = []
    characters = number = 0
    for piece in pieces:
        document += piece.starts
        together.append((piece.starts, piece.content))
        characters += _size(piece.content)
        if characters >= size:
            yield Task(number, before, tuple(together))
            number, before, characters, together = number + 1, document, 0, []
    if together:
        yield Task(number, before, tuple(together))


def _size(content: str | list[str]) -> int:
    return len(content) if isinstance(content, str) else sum(len(each) + 1 for each in content)


@dataclass(frozen=True)
class Numbering:
    """How sentences become numbers: by a tokenizer, or where there is none yet by the words that come."""

    max_length: int
    lower: bool = False
    tokens: Tokens | None = None
    verbatim: bool = False
    """Sentences are taken as they are, blanks and empty ones too."""

    def shard(self, task: Task) -> Shard:
        """Cut the pieces of a shard into sentences and number them."""
        words = None if self.tokens is not None else WordIds(self.lower)
        parts: list[Any] = []
        for sentences, of_document in _together(task, self.verbatim):
            if words is not None:
                numbers, lengths = words.number(sentences, self.max_length)
            else:
                assert self.tokens is not None
                numbers, lengths = packed(self.tokens.encode(sentences, self.max_length))
            parts.append((numbers, lengths.astype(np.int32), np.array(of_document, dtype=np.int32)))
        parts = parts or [[np.zeros(0, np.int32)] * 3]
        flat, lengths, owners = (np.concatenate(each) for each in zip(*parts, strict=True))
        if words is None:
            return Shard(flat, lengths, owners)
        return Shard(flat, lengths, owners, tuple(words.index), words.counts)


def packed(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids as (T,) int32 and their lengths."""
    lengths = np.array([len(each) for each in ids], dtype=np.int64)
    flat = np.fromiter((i for each in ids for i in each), dtype=np.int32, count=int(lengths.sum()))
    return flat, lengths


def _together(task: Task, verbatim: bool) -> Iterator[tuple[list[str], list[int]]]:
    """Sentences of a task with their documents, so many that they are numbered together."""
    document, left = task.before, task.most
    sentences: list[str] = []
    owners: list[int] = []
    size = 0
    for starts, content in task.pieces:
        document += starts
        found = (content if verbatim and isinstance(content, list) else sentences_of(content))[:left]
        left = None if left is None else left - len(found)
        sentences += found
        owners += [document] * len(found)
        size += _size(content)
        if size >= TOGETHER:
            yield sentences, owners
            sentences, owners, size = [], [], 0
    if sentences:
        yield sentences, owners
