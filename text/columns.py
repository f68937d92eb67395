"""Pairs of somebody's own: an anchor, its positive and any number of negatives in each row of a table."""

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dipole.core.ground.errors import ConfigError, DataError, nearest
from dipole.core.ground.rows import located_rows
from dipole.core.ground.text import counted
from dipole.text.corpus import READER

# Usual names, each set with the anchor's first; a name and a number (negative_3) is one of them too.
USUAL = (
    ("anchor", "positive", ("negative",)),
    ("anchor", "pos", ("neg",)),
    ("query", "positive", ("negative",)),
    ("query", "pos", ("neg",)),
    ("query", "answer", ("negative",)),
    ("question", "answer", ("negative",)),
    ("premise", "entailment", ("contradiction",)),
    ("sent0", "sent1", ("hard_neg",)),
    ("sentence1", "sentence2", ("negative", "sentence3")),
    ("sentence_1", "sentence_2", ("negative",)),
    ("text1", "text2", ("negative",)),
)
Order = Callable[[int, int, int], np.ndarray]
"""(epoch, round, n) -> an order of n rows."""
TRIES = 20  # orders that are tried before a batch without duplicates counts as impossible


@dataclass(frozen=True)
class PairTable:
    """Rows of texts that belong together, as numbers of distinct texts.

    Args:
        texts: each text once, in the order in which it comes first.
        anchor, positive: (n,) numbers of texts.
        negatives: (n, m) the same, -1 behind those of a row with fewer; m may be 0.
        columns: names of the columns that were read.
        incomplete: rows left out because the anchor or the positive is missing.
        fewer: rows kept although a cell of a negative is missing.
    """

    texts: list[str]
    anchor: np.ndarray
    positive: np.ndarray
    negatives: np.ndarray
    columns: tuple[str, ...]
    incomplete: int = 0
    fewer: int = 0

    def __len__(self) -> int:
        return len(self.anchor)

    @property
    def fingerprint(self) -> str:
        """Content hash of which text stands where; the texts have their own."""
        digest = hashlib.sha256()
        for numbers in (self.anchor, self.positive, self.negatives):
            digest.update(np.ascontiguousarray(numbers).tobytes())
        return digest.hexdigest()[:16]

    def take(self, rows: np.ndarray) -> tuple["PairTable", np.ndarray]:
        """Some rows alone, and the numbers that their texts had; the texts themselves stay behind."""
        whole = np.column_stack([self.anchor[rows], self.positive[rows], self.negatives[rows]])
        texts = np.unique(whole[whole >= 0])
        numbers = np.where(whole < 0, -1, np.searchsorted(texts, whole))
        return PairTable([], numbers[:, 0], numbers[:, 1], numbers[:, 2:], self.columns), texts

    def texts_of(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """The different texts of each row."""
        whole = np.column_stack([self.anchor[rows], self.positive[rows], self.negatives[rows]])
        return [tuple(dict.fromkeys(text for text in row if text >= 0)) for row in whole.tolist()]


def read_pairs(
    source: str,
    columns: Sequence[str] | None = None,
    *,
    split: str = "train",
    encoding: str = "utf-8",
    limit: int | None = None,
) -> PairTable:
    """Read a table of pairs.

    A cell is a text. A negative may be a list of texts, each a negative, and so may a positive: then every text of it
    makes a row. A cell that is absent, null, empty or blank is missing: without its anchor or positive a row is left
    out, without a negative it is kept. Both are counted, and said in a warning.

    Args:
        source: see `rows.located_rows`.
        columns: anchor, positive and any negatives; None finds them by their usual names (`USUAL`).
        split: of a data set.
        encoding: of CSV files.
        limit: rows that are read.

    Raises:
        ConfigError: wrong names. DataError: the source cannot be read, a column is not there, a cell is neither a
            text nor a list of texts, or
            no row is complete; the message names file and line.
    """
    if columns is not None:
        check_columns(columns)
    place: dict[str, int] = {}
    anchors: list[int] = []
    positives: list[int] = []
    negatives: list[list[int]] = []
    found: tuple[str, ...] | None = None
    incomplete = fewer = read = 0
    for where, row in located_rows(source, split, encoding, READER):
        if limit is not None and read == limit:
            break
        read += 1
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected named columns, got {type(row).__name__}: {str(row)[:60]!r}")
        if found is None:
            found = tuple(columns) if columns is not None else _usual(row, where)
            _check_there(found, row, where)
        cells = [_texts(row.get(name), name, where) for name in found]
        if len(cells[0]) > 1:
            raise DataError(f"{where}: the anchor {found[0]!r} holds {len(cells[0])} texts; it must be one")
        if not cells[0] or not cells[1]:
            incomplete += 1
            continue
        fewer += not all(cells[2:])
        numbers = [[place.setdefault(text, len(place)) for text in cell] for cell in cells]
        for positive in numbers[1]:
            anchors.append(numbers[0][0])
            positives.append(positive)
            negatives.append([number for cell in numbers[2:] for number in cell])
    if found is None:
        raise DataError(f"{source} holds no row")
    if not anchors:
        raise DataError(
            f"{source}: none of {counted(incomplete, 'row')} has both {found[0]!r} and {found[1]!r}: a cell of each "
            f"is missing. Say text.columns = [anchor, positive, negatives ...]."
        )
    if incomplete or fewer:
        said = [
            f"{incomplete} have no {found[0]!r} or no {found[1]!r} and are left out" if incomplete else "",
            f"{fewer} lack a negative and are kept with those they have" if fewer else "",
        ]
        warnings.warn(f"{source}: of {read} rows {', '.join(filter(None, said))}", stacklevel=2)
    wide = np.full((len(negatives), max(map(len, negatives))), -1, dtype=np.int64)
    for number, hard in enumerate(negatives):
        wide[number, : len(hard)] = hard
    return PairTable(list(place), np.array(anchors), np.array(positives), wide, found, incomplete, fewer)


def check_columns(columns: Sequence[str]) -> None:
    """Raise ConfigError where names cannot be those of a table of pairs."""
    if len(columns) < 2 or len(set(columns)) < len(columns) or not all(columns):
        raise ConfigError(
            f"columns must name an anchor, a positive and any negatives, each once, got {list(columns)}; for example "
            f'["anchor", "positive", "negative"]'
        )


def _usual(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Columns with usual names, in the order anchor, positive, negatives."""
    lower = {str(name).lower(): str(name) for name in row}
    for anchor, positive, starts in USUAL:
        if anchor in lower and positive in lower:
            hard = [name for each, name in lower.items() if _numbered_as(each, starts) and each != positive]
            return (lower[anchor], lower[positive], *hard)
    known = ", ".join(f"{anchor}/{positive}/{starts[0]}" for anchor, positive, starts in USUAL)
    raise DataError(
        f"{where}: no usual names among the columns {', '.join(map(str, row))}; known are {known}. "
        f"Say text.columns = [anchor, positive, negatives ...]."
    )


def _numbered_as(name: str, starts: Sequence[str]) -> bool:
    """Whether it is one of the names, its plural, or either with a number behind."""
    stem = name.rstrip("0123456789").rstrip("_-")
    return any(stem in (start, f"{start}s", f"hard_{start}", f"hard_{start}s") for start in starts)


def _check_there(columns: Sequence[str], row: dict[str, Any], where: str) -> None:
    missing = next((name for name in columns if name not in row), None)
    if missing is not None:
        has = [str(name) for name in row]
        raise DataError(f"{where}: no column {missing!r}; it has {', '.join(has)}.{nearest(missing, has)}")


def _texts(cell: Any, name: str, where: str) -> list[str]:
    """The texts of a cell, blanks made single; what is missing is none."""
    listed = cell if isinstance(cell, list | tuple) else [cell]
    found = []
    for each in listed:
        if each is None or (isinstance(each, float) and each != each):
            continue
        if not isinstance(each, str):
            raise DataError(f"{where}: column {name!r} holds {type(each).__name__}, expected a text or a list of texts")
        text = " ".join(each.split())
        if text:
            found.append(text)
    return found


# Batches ---------------------------------------------------------------------------------------------------------


def without_duplicates(texts: Sequence[tuple[int, ...]], order: Sequence[int], size: int) -> Iterator[list[int]]:
    """Cut rows into batches in which no text occurs in two rows, as sentence-transformers' NO_DUPLICATES sampler does.

    A row that shares a text with one of the batch waits for a later batch, where those that wait come first. What
    does not fill a batch at the end is left out.

    Args:
        texts: of each row. order: of the rows. size: of a batch.
    """
    waiting: dict[int, deque[int]] = {}  # by the text that stood in their way
    rest = iter(order)
    while True:
        batch: list[int] = []
        taken: set[int] = set()
        for row in _offered(waiting, rest, taken):
            clash = next((text for text in texts[row] if text in taken), None)
            if clash is not None:
                waiting.setdefault(clash, deque()).append(row)
                continue
            batch.append(row)
            taken.update(texts[row])
            if len(batch) == size:
                break
        if len(batch) < size:
            return
        yield batch


def _offered(waiting: dict[int, deque[int]], rest: Iterator[int], taken: set[int]) -> Iterator[int]:
    """Rows that wait, of each text until it is in the batch, then the others."""
    for text in list(waiting):
        while text not in taken and waiting[text]:
            yield waiting[text].popleft()
        if not waiting[text]:
            del waiting[text]
    yield from rest


class PairBatches:
    """The batches of every epoch, each a function of seed and epoch alone and the same on every rank.

    An epoch has as many batches as that of the first order that fills one. Where a later order fills fewer, rows are
    drawn once more for the rest.

    Args:
        table: the pairs. rows: those that are trained on. size: rows of a global batch.
        draw: the order of the rows; rounds count orders within an epoch.
        apart: no text occurs in two rows of a batch.

    Raises:
        DataError: no batch of that size is without duplicates.
    """

    def __init__(self, table: PairTable, rows: np.ndarray, size: int, draw: Order, *, apart: bool) -> None:
        self._rows, self._size, self._draw = rows, size, draw
        self._texts = table.texts_of(rows)
        every = [text for texts in self._texts for text in texts]
        self._apart = apart and len(set(every)) < len(every)
        self.count = len(rows) // size
        if self._apart and self.count:
            self.count = next((n for tried in range(TRIES) if (n := sum(1 for _ in self._cut(0, tried)))), 0)
            if not self.count:
                text, most = max(zip(*np.unique(every, return_counts=True), strict=True), key=lambda pair: pair[1])
                raise DataError(
                    f"no {size} of the {counted(len(rows), 'row')} are without a text in common, and in a batch it "
                    "would be a "
                    f"negative of itself ({table.texts[int(text)][:60]!r} stands in {counted(most, 'row')}). Lower "
                    f"train.batch_size, or set text.no_duplicates = false."
                )

    def epoch(self, number: int) -> list[np.ndarray]:
        """(size,) row numbers of the table, batch after batch."""
        found: list[np.ndarray] = []
        for tried in range(TRIES * max(1, self.count)):
            found += self._cut(number, tried)
            if len(found) >= self.count:
                return found[: self.count]
        raise DataError(f"no more than {len(found)} of {self.count} batches are without duplicates; lower the batch.")

    def _cut(self, epoch: int, tried: int) -> Iterator[np.ndarray]:
        order = self._draw(epoch, tried, len(self._rows))
        if self._apart:
            for batch in without_duplicates(self._texts, order.tolist(), self._size):
                yield self._rows[batch]
        else:
            yield from self._rows[order[: self.count * self._size]].reshape(self.count, self._size)
