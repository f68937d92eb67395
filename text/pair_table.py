"""A table of pairs: each row is an anchor, a positive and negatives, as numbers of distinct texts."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from dipole.core.utils.files import atomic_file, remove_scratch
from dipole.text.cache import read_index, write_index
from dipole.text.splitting import READER

ARRAYS = ("anchor", "positive", "negatives")
TEXTS, SCRATCH = "texts.arrow", "rows.arrow.tmp"
TOGETHER = 10_000  # rows that are read together


class Counts(TypedDict):
    """Counts of a `PairTable`."""

    columns: tuple[str, ...]
    read: int
    incomplete: int
    fewer: int


@dataclass(frozen=True)
class PairTable:
    """Rows of texts that belong together, as numbers of distinct texts. Arrays can be memory maps.

    Args:
        texts: the distinct texts, in the order of their first occurrence.
        anchor, positive: (n,) numbers of texts.
        negatives: (n, m) the same, filled with -1 on the right. m can be 0.
        columns: names of the columns that were read.
        read: rows that were read.
        incomplete: rows without anchor or positive, which were skipped.
        fewer: rows with a missing negative, which were used.
        known: values that were computed when the files were written.
    """

    texts: Sequence[str]
    anchor: np.ndarray
    positive: np.ndarray
    negatives: np.ndarray
    columns: tuple[str, ...]
    read: int = 0
    incomplete: int = 0
    fewer: int = 0
    known: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.anchor)

    @property
    def fingerprint(self) -> str:
        """Content hash of the numbers. The texts have their own."""
        if "fingerprint" not in self.known:
            digest = hashlib.sha256()
            for numbers in (self.anchor, self.positive, self.negatives):
                digest.update(np.ascontiguousarray(numbers).data)
            self.known["fingerprint"] = digest.hexdigest()[:16]
        return self.known["fingerprint"]

    @property
    def texts_hash(self) -> str:
        """Content hash of the texts."""
        if "texts_hash" not in self.known:
            digest = hashlib.sha256()
            for start in range(0, len(self.texts), TOGETHER):
                digest.update("\n".join(self.texts[start : start + TOGETHER]).encode())
            self.known["texts_hash"] = digest.hexdigest()
        return self.known["texts_hash"]

    def take(self, rows: np.ndarray) -> tuple["PairTable", np.ndarray]:
        """Return some rows as a table without texts, and the numbers that their texts had."""
        numbers = self.numbers_of(rows)
        texts = np.unique(numbers[numbers >= 0])
        renumbered = np.where(numbers < 0, -1, np.searchsorted(texts, numbers))
        return PairTable([], renumbered[:, 0], renumbered[:, 1], renumbered[:, 2:], self.columns), texts

    def numbers_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the anchor, the positive and the negatives of each row, (r, 2 + m)."""
        return np.column_stack([self.anchor[rows], self.positive[rows], self.negatives[rows]])

    def texts_of(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """Return the distinct texts of each row."""
        return [tuple(dict.fromkeys(text for text in row if text >= 0)) for row in self.numbers_of(rows).tolist()]


class PairWriter:
    """Collects rows and numbers their texts. The texts lie on the disk if there is a folder.

    Equal texts are found by digests (128 bits of SHA-256): 16 bytes of memory for each text that is added.

    Args:
        folder: for the files of the table, locked by the caller. None: all in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._digests = bytearray()
        self._rows = array("q")  # of each row: its first text, its positives, its negatives
        self._count = 0
        self._held: list[str] = []
        self._writer: Any = None
        if folder is not None:
            remove_scratch(folder)  # of a killed process
            self._writer = _text_writer(folder / SCRATCH)

    def add(self, anchor: str, positives: Sequence[str], negatives: Sequence[str]) -> None:
        """Add a row for each positive, all with the same anchor and negatives."""
        texts = [anchor, *positives, *negatives]
        self._rows.extend((self._count, len(positives), len(negatives)))
        for text in texts:
            self._digests += hashlib.sha256(text.encode()).digest()[:16]
            if self._writer is None:
                self._held.append(text)
            else:
                self._writer.write({"text": text})
        self._count += len(texts)

    def table(self, **counts: Unpack[Counts]) -> PairTable:
        """Return the table in memory."""
        rows, numbers, is_first = self._finished()
        texts = [text for text, first in zip(self._held, is_first.tolist(), strict=True) if first]
        return PairTable(texts, *_table_arrays(rows, numbers), **counts)

    def write(self, **counts: Unpack[Counts]) -> None:
        """Write the files of the table."""
        assert self._folder is not None
        folder = self._folder
        self._writer.finalize()
        rows, numbers, is_first = self._finished()
        with atomic_file(folder / TEXTS) as file:
            writer = _text_writer(file)
            for text in _selected(folder / SCRATCH, is_first):
                writer.write({"text": text})
            writer.finalize()
        for name, values in zip(ARRAYS, _table_arrays(rows, numbers), strict=True):
            with atomic_file(folder / f"{name}.npy") as file:
                np.save(file, values)
        table = _opened(folder, counts, {})
        known = {"fingerprint": table.fingerprint, "texts_hash": table.texts_hash}
        files = [TEXTS, *(f"{name}.npy" for name in ARRAYS)]
        write_index(folder, {"counts": counts, "known": known}, files)

    def close(self) -> None:
        """Remove the scratch file."""
        if self._folder is not None:
            self._writer.close()
            (self._folder / SCRATCH).unlink(missing_ok=True)

    def _finished(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        digests = np.frombuffer(bytes(self._digests), np.uint64).reshape(-1, 2)
        return np.array(self._rows, np.int64).reshape(-1, 3), *_numbered(digests)


def load_table(folder: Path) -> PairTable | None:
    """Open the table of a complete folder. Return None, or raise, if it is incomplete or damaged."""
    index = read_index(folder)
    if index is None:
        return None
    return _opened(folder, index["counts"], index["known"])


def _opened(folder: Path, counts: Counts, known: dict[str, str]) -> PairTable:
    texts = READER.package("datasets").Dataset.from_file(str(folder / TEXTS))["text"]
    # Slices of plain arrays are made several times as fast as slices of memory maps.
    anchor, positive, negatives = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS)
    counts = {**counts, "columns": tuple(counts["columns"])}
    return PairTable(texts, anchor, positive, negatives, **counts, known=dict(known))


def _text_writer(to: Any) -> Any:
    datasets = READER.package("datasets")
    target = {"stream": to}
    if isinstance(to, Path):
        target = {"path": str(to)}
    features = datasets.Features({"text": datasets.Value("string")})
    return datasets.arrow_writer.ArrowWriter(features=features, **target)


def _selected(file: Path, mask: np.ndarray) -> Iterator[str]:
    """Yield the texts of an Arrow file where the mask is True."""
    texts = READER.package("datasets").Dataset.from_file(str(file))["text"]
    for start in range(0, len(mask), TOGETHER):
        part = mask[start : start + TOGETHER].tolist()
        for text, wanted in zip(texts[start : start + TOGETHER], part, strict=True):
            if wanted:
                yield text


def _numbered(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number equal digests alike, in the order of their first occurrence.

    Args:
        digests: (t, 2) uint64.

    Returns:
        (t,) int64 numbers, and (t,) bool, True at each first occurrence.
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests stay in their order
    in_order = digests[order]
    heads = np.ones(len(order), bool)
    heads[1:] = (in_order[1:] != in_order[:-1]).any(1)
    first = np.empty(len(order), np.int64)
    first[order] = order[heads][np.cumsum(heads) - 1]
    is_first = first == np.arange(len(first))
    return (np.cumsum(is_first) - 1)[first], is_first


def _table_arrays(rows: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return anchor (n,), positive (n,) and negatives (n, m) of rows (first text, positives, negatives)."""
    first, positives, negatives = rows.T
    repeated = np.repeat(np.arange(len(rows)), positives)  # the row of each pair
    nth = np.arange(len(repeated)) - np.repeat(np.cumsum(positives) - positives, positives)
    columns = np.arange(negatives.max(initial=0))
    present = columns < negatives[repeated, None]
    hard = np.full(present.shape, -1, np.int64)
    places = (first + 1 + positives)[repeated, None] + columns
    hard[present] = numbers[places[present]]
    return numbers[first[repeated]], numbers[first[repeated] + 1 + nth], hard
