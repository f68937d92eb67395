"""Batches of a pair table in which no text is a negative of itself."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted
from dipole.text.pair_table import PairTable

Order = Callable[[int, int, int], np.ndarray]
"""(epoch, round, n) -> an order of n rows."""
TRIES = 20  # orders that are tried before a batch without duplicates counts as impossible
TOGETHER = 10_000  # rows whose texts are looked up together

Row = tuple[int, tuple[int, ...]]
"""The number of a row and those of its different texts."""


def without_duplicates(rows: Iterable[Row], size: int) -> Iterator[list[int]]:
    """Cut rows into batches in which no text occurs in two rows, as sentence-transformers' NO_DUPLICATES sampler does.

    A row that shares a text with one of the batch waits for a later batch, where waiting rows come first. The
    last, incomplete batch is dropped.

    Args:
        rows: in their order. size: of a batch.
    """
    waiting: dict[int, deque[Row]] = {}  # by the text that they have to wait for
    rest = iter(rows)
    while True:
        batch: list[int] = []
        taken: set[int] = set()
        for row, texts in _offered(waiting, rest, taken):
            clash = next((text for text in texts if text in taken), None)
            if clash is not None:
                waiting.setdefault(clash, deque()).append((row, texts))
                continue
            batch.append(row)
            taken.update(texts)
            if len(batch) == size:
                break
        if len(batch) < size:
            return
        yield batch


def _offered(waiting: dict[int, deque[Row]], rest: Iterator[Row], taken: set[int]) -> Iterator[Row]:
    """Yield waiting rows, of each text until it is in the batch, then the others."""
    for text in list(waiting):
        while text not in taken and waiting[text]:
            yield waiting[text].popleft()
        if not waiting[text]:
            del waiting[text]
    for row in rest:  # noqa: UP028 - `yield from` would end the rest with this batch
        yield row


class PairBatches:
    """The batches of every epoch, each a function of seed and epoch alone and the same on every rank.

    An epoch has as many batches as the first order fills. If a later order fills fewer, rows are drawn again for the
    rest.

    Args:
        table: the pairs. rows: those that are trained on. size: rows of a global batch.
        draw: returns the order of the rows. Rounds count orders within an epoch.
        no_duplicates: no text occurs in two rows of a batch.

    Raises:
        DataError: no batch of that size is without duplicates.
    """

    def __init__(self, table: PairTable, rows: np.ndarray, size: int, draw: Order, *, no_duplicates: bool) -> None:
        self._table, self._rows, self._size, self._draw = table, rows, size, draw
        self._apart = no_duplicates and self._has_duplicates()
        self.count = len(rows) // size
        if self._apart and self.count:
            self.count = next((n for tried in range(TRIES) if (n := sum(1 for _ in self._cut(0, tried)))), 0)
            if not self.count:
                text, most = self._most_frequent()
                raise DataError(
                    f"no {size} of the {counted(len(rows), 'row')} are without a text in common, and in a batch it "
                    f"would be a negative of itself ({table.texts[text][:60]!r} stands in {counted(most, 'row')}). "
                    f"Lower train.batch_size, or set text.no_duplicates = false."
                )

    def epoch(self, number: int) -> np.ndarray:
        """(count, size) row numbers of the table, batch after batch."""
        found, filled = np.empty((self.count, self._size), np.int64), 0
        for tried in range(TRIES * max(1, self.count)):
            for batch in self._cut(number, tried):
                if filled == self.count:
                    break
                found[filled] = batch
                filled += 1
            if filled == self.count:
                return found
        raise DataError(f"no more than {filled} of {self.count} batches are without duplicates; lower the batch.")

    def _cut(self, epoch: int, tried: int) -> Iterator[np.ndarray]:
        order = self._draw(epoch, tried, len(self._rows))
        if self._apart:
            for batch in without_duplicates(self._offer(order), self._size):
                yield self._rows[batch]
        else:
            yield from self._rows[order[: self.count * self._size]].reshape(self.count, self._size)

    def _offer(self, order: np.ndarray) -> Iterator[Row]:
        for start in range(0, len(order), TOGETHER):
            part = order[start : start + TOGETHER]
            yield from zip(part.tolist(), self._table.texts_of(self._rows[part]), strict=True)

    def _texts(self) -> Iterator[np.ndarray]:
        """Yield numbers of texts, some rows at a time. A text is listed once for each of its rows."""
        for start in range(0, len(self._rows), TOGETHER):
            texts = np.sort(self._table.numbers_of(self._rows[start : start + TOGETHER]), axis=1)
            differ = texts >= 0
            differ[:, 1:] &= texts[:, 1:] != texts[:, :-1]
            yield texts[differ]

    def _has_duplicates(self) -> bool:
        """Return whether two rows have a text in common."""
        seen = np.zeros(len(self._table.texts), bool)
        for texts in self._texts():
            if seen[texts].any() or len(np.unique(texts)) < len(texts):
                return True
            seen[texts] = True
        return False

    def _most_frequent(self) -> tuple[int, int]:
        """Return the text of most rows, and the number of these rows."""
        counts = np.zeros(len(self._table.texts), np.int64)
        for texts in self._texts():
            np.add.at(counts, texts, 1)
        return int(counts.argmax()), int(counts.max())
