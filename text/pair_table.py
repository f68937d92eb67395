"""A table of pairs: each row is an anchor, a positive and negatives, as numbers of distinct texts."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from dipole.core.utils.files import atomic_file, remove_scratch, replacing
from dipole.text.cache import read_index, write_index
from dipole.text.splitting import READER

ARRAYS = ("anchor", "positive", "negatives")
TEXTS = "texts.arrow"
TOGETHER = 10_000  # texts that are hashed together


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
        anchor, positive: (n,) numbers of texts. negatives: (n, m) the same, filled with -1 on the right.
        read, incomplete, fewer: rows that were read, skipped without anchor or positive, and used without a negative.
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
    """Collects rows and numbers their texts in the order of their first occurrence.

    A text is found again by its digest (128 bits of SHA-256). The texts go into an Arrow file if there is one.

    Args:
        file: path for the distinct texts. None: all in memory.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._numbers: dict[bytes, int] = {}
        self._pairs = array("q")  # anchor and positive of each pair
        self._counts = array("q")  # negatives of each pair
        self._negatives = array("q")
        self._texts: list[str] = []
        self._writer: Any = None
        if file is not None:
            datasets = READER.package("datasets")
            features = datasets.Features({"text": datasets.Value("string")})
            self._writer = datasets.arrow_writer.ArrowWriter(features=features, path=str(file))

    def add(self, anchor: str, positives: Sequence[str], negatives: Sequence[str]) -> None:
        """Add a pair for each positive, all with the same anchor and negatives."""
        first, *others = (self._number(text) for text in (anchor, *positives, *negatives))
        for positive in others[: len(positives)]:
            self._pairs.extend((first, positive))
            self._counts.append(len(negatives))
            self._negatives.extend(others[len(positives) :])

    def _number(self, text: str) -> int:
        known = len(self._numbers)
        number = self._numbers.setdefault(hashlib.sha256(text.encode()).digest()[:16], known)
        if number == known and self._writer is None:
            self._texts.append(text)
        elif number == known:
            self._writer.write({"text": text})
        return number

    def table(self, **counts: Unpack[Counts]) -> PairTable:
        """Return the table in memory."""
        return PairTable(self._texts, *self._arrays(), **counts)

    def write(self, folder: Path) -> None:
        """Write the numbers, and complete the file of the texts."""
        self._writer.finalize()
        for name, values in zip(ARRAYS, self._arrays(), strict=True):
            with atomic_file(folder / f"{name}.npy") as file:
                np.save(file, values)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return anchor (n,), positive (n,) and negatives (n, m)."""
        pairs = np.array(self._pairs, np.int64).reshape(-1, 2)
        counts = np.array(self._counts, np.int64)
        present = np.arange(counts.max(initial=0)) < counts[:, None]
        negatives = np.full(present.shape, -1, np.int64)
        negatives[present] = self._negatives
        return pairs[:, 0], pairs[:, 1], negatives


def write_table(folder: Path, fill: Callable[[PairWriter], Counts]) -> None:
    """Write the files of a table. `fill` adds its rows."""
    remove_scratch(folder)  # of a killed process
    with replacing(folder / TEXTS) as temporary:
        writer = PairWriter(temporary)
        counts = fill(writer)
        writer.write(folder)
    table = _opened(folder, counts, {})
    known = {"fingerprint": table.fingerprint, "texts_hash": table.texts_hash}
    write_index(folder, {"counts": counts, "known": known}, [TEXTS, *(f"{name}.npy" for name in ARRAYS)])


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
