"""A table of pairs as numbers of texts, in files that are mapped or in memory."""

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.utils.cache import sum_of
from dipole.core.utils.files import atomic_file, atomic_write, remove_scratch
from dipole.text.filled_folder import INDEX, index_of, is_summed
from dipole.text.spool import Spool, Texts
from dipole.text.watch import Watch

ARRAYS = ("anchor", "positive", "negatives", "offsets")
PARTS = "parts"  # what is there only while a folder is filled
READ = 1 << 18  # numbers that are looked at together


@dataclass(frozen=True)
class PairTable:
    """Rows of texts that belong together, as numbers of distinct texts.

    Args:
        texts: each text once, in the order in which it comes first.
        anchor, positive: (n,) numbers of texts.
        negatives: (n, m) the same, -1 behind those of a row with fewer; m may be 0.
        columns: names of the columns that were read.
        read: rows that were read.
        incomplete: rows left out because the anchor or the positive is missing.
        fewer: rows kept although a cell of a negative is missing.
        texts_hash: of the texts alone, where they were read.
    """

    texts: Sequence[str]
    anchor: np.ndarray
    positive: np.ndarray
    negatives: np.ndarray
    columns: tuple[str, ...]
    read: int = 0
    incomplete: int = 0
    fewer: int = 0
    texts_hash: str = ""
    known: str | None = field(default=None, repr=False)
    """The fingerprint, where it was worked out earlier."""
    watch: Watch | None = field(default=None, compare=False, repr=False)
    """Looks whether the files are intact."""

    def __len__(self) -> int:
        return len(self.anchor)

    @property
    def fingerprint(self) -> str:
        """Content hash of which text stands where; the texts have their own."""
        if self.known is not None:
            return self.known
        digest = hashlib.sha256()
        for numbers in (self.anchor, self.positive, self.negatives):
            step = max(1, READ // max(1, numbers[:1].size))
            for start in range(0, len(numbers), step):
                digest.update(np.ascontiguousarray(numbers[start : start + step]).tobytes())
        return digest.hexdigest()[:16]

    def held(self) -> "PairTable":
        """The same in memory, whatever becomes of the files."""
        anchor, positive, negatives = (np.array(each) for each in (self.anchor, self.positive, self.negatives))
        return replace(self, texts=list(self.texts), anchor=anchor, positive=positive, negatives=negatives, watch=None)

    def check(self) -> None:
        """Raise DataError where files were found to be damaged."""
        if self.watch is not None:
            self.watch.check()

    def take(self, rows: np.ndarray) -> tuple["PairTable", np.ndarray]:
        """Some rows alone, and the numbers that their texts had; the texts themselves stay behind."""
        whole = self.numbers_of(rows)
        texts = np.unique(whole[whole >= 0])
        numbers = np.where(whole < 0, -1, np.searchsorted(texts, whole))
        return PairTable([], numbers[:, 0], numbers[:, 1], numbers[:, 2:], self.columns), texts

    def numbers_of(self, rows: np.ndarray) -> np.ndarray:
        """(r, 2 + m) the anchor, the positive and the negatives of each row."""
        return np.column_stack([self.anchor[rows], self.positive[rows], self.negatives[rows]])

    def texts_of(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """The different texts of each row."""
        whole = self.numbers_of(rows)
        if (whole < 0).any():
            return [tuple(dict.fromkeys(text for text in row if text >= 0)) for row in whole.tolist()]
        return [tuple(dict.fromkeys(row)) for row in whole.tolist()]


class PairWriter:
    """Writes the files of a table, row by row; a folder is full once it is finished.

    Args:
        folder: held by nobody else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._parts = folder, folder / PARTS
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir(parents=True)
        remove_scratch(folder)  # of a process that was killed
        self._spool = Spool(self._parts)
        self._rows, self._pending, self._most = (self._parts / "rows.all").open("wb"), array("q"), 0

    def __enter__(self) -> "PairWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._spool.close()
        shutil.rmtree(self._parts, ignore_errors=True)

    def add(self, cells: Sequence[Sequence[str]]) -> int:
        """Add a row for each positive: the anchor alone, its positives, and cells of negatives.

        Returns:
            the characters of its texts.
        """
        add, (anchors, positives, *negatives) = self._spool.add, cells
        anchor, beside = add(anchors[0]), [add(text) for text in positives]
        first = len(self._spool)
        for cell in negatives:
            for text in cell:
                add(text)
        count = len(self._spool) - first
        self._most = max(self._most, count)
        for positive in beside:
            self._pending.extend((anchor, positive, first, count))
        if len(self._pending) >= READ:
            self._write()
        return sum(len(text) for cell in cells for text in cell)

    def _write(self) -> None:
        self._rows.write(self._pending.tobytes())
        self._pending = array("q")

    def finish(self, told: Mapping[str, Any]) -> None:
        """Number the texts and write what `load_table` reads, with what is told beside it."""
        self._write()
        self._rows.close()
        folder = self._folder
        with atomic_file(folder / "texts.bin") as texts, atomic_file(folder / "offsets.bin") as offsets:
            numbers, texts_hash = self._spool.distinct(texts, offsets)
        with (
            atomic_file(folder / "anchor.bin") as anchor,
            atomic_file(folder / "positive.bin") as positive,
            atomic_file(folder / "negatives.bin") as negatives,
        ):
            for rows in self._read():
                anchor.write(numbers[rows[:, 0]].tobytes())
                positive.write(numbers[rows[:, 1]].tobytes())
                there = np.arange(self._most) < rows[:, 3:]
                wide = np.full(there.shape, -1, np.int64)
                wide[there] = numbers[(rows[:, 2:3] + np.arange(self._most))[there]]
                negatives.write(wide.tobytes())
        del numbers  # a file that is mapped is not removed everywhere
        files = {name: sum_of(folder / name) for name in (*(f"{name}.bin" for name in ARRAYS), "texts.bin")}
        index = {**told, "most": self._most, "texts_hash": texts_hash, "files": files}
        index["fingerprint"] = _mapped(folder, index).fingerprint
        atomic_write(folder / INDEX, json.dumps(index))

    def _read(self) -> Iterator[np.ndarray]:
        """(r, 4) of some rows: numbers of the anchor, the positive and the first negative, and how many there are."""
        step = max(1, READ // (4 + self._most))
        with open(self._parts / "rows.all", "rb") as file:
            while data := file.read(32 * step):
                yield np.frombuffer(data, np.int64).reshape(-1, 4)


def load_table(folder: Path) -> PairTable:
    """The table of a full folder.

    Raises:
        ValueError: it is not full; where it is damaged any of a number of exceptions (`cache.found`).
    """
    index = index_of(folder)
    if index is None:
        raise ValueError(f"{folder} holds no table of pairs")
    return _mapped(folder, index)


def _mapped(folder: Path, index: Mapping[str, Any]) -> PairTable:
    arrays = {name: _array(folder / f"{name}.bin", np.int64) for name in ARRAYS}
    data = _array(folder / "texts.bin", np.uint8)
    watch = None
    if not is_summed(dict(index)):
        sums = {name: check for name, (_, check) in index["files"].items()}
        every = {name: (array, sums[f"{name}.bin"]) for name, array in (arrays | {"texts": data}).items()}
        watch = Watch(folder / INDEX, every)
    return PairTable(
        Texts(data, arrays["offsets"]),
        arrays["anchor"],
        arrays["positive"],
        arrays["negatives"].reshape(-1, index["most"]) if index["most"] else np.zeros((len(arrays["anchor"]), 0), int),
        tuple(index["columns"]),
        index["read"],
        index["incomplete"],
        index["fewer"],
        index["texts_hash"],
        index.get("fingerprint"),
        watch,
    )


def _array(file: Path, kind: type) -> np.ndarray:
    # A view of a plain array: those of a memory map are made several times as slowly.
    return np.asarray(np.memmap(file, kind, mode="r")) if file.stat().st_size else np.zeros(0, kind)
