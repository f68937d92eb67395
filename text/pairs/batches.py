"""Batches of a pair table in which no text is a negative of itself."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

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
    rest. Raise DataError if no batch of that size is without duplicates.
    """

    def __init__(self, table: PairTable, rows: np.ndarray, size: int, draw: Order, *, no_duplicates: bool) -> None:
        self._table, self._rows, self._size, self._draw, self._apart = table, rows, size, draw, no_duplicates
        self.count = len(rows) // size
        if no_duplicates and self.count:
            self.count = next((n for tried in range(TRIES) if (n := sum(1 for _ in self._cut(0, tried)))), 0)
            if not self.count:
                text, most = self._most_frequent()
                raise DataError(
                    f"no {size} of the {counted(len(rows), 'row')} are without a text in common, and in a batch it "
                    f"would be a negative of itself ({table.texts[text][:60]!r} stands in {counted(most, 'row')}). "
                    f"Lower train.batch_size, or set text.no_duplicates = false."
                )

    def notes(self) -> Sequence[str]:
        """Return a warning if rows are left out because they share texts, beyond an incomplete last batch."""
        left_out = len(self._rows) - self.count * self._size
        if left_out < self._size:
            return []
        text, most = self._most_frequent()
        rows = counted(len(self._rows), "row")
        return [
            f"text.no_duplicates leaves out {left_out} of {rows} in each epoch, because they share texts with others "
            f"({self._table.texts[text][:60]!r} stands in {counted(most, 'row')}). Lower train.batch_size, remove "
            f"duplicates, or set text.no_duplicates = false"
        ]

    def epoch(self, number: int) -> np.ndarray:
        """(count, size) row numbers of the table, batch after batch."""
        orders = (self._cut(number, tried) for tried in range(TRIES * max(1, self.count)))
        found = list(islice(chain.from_iterable(orders), self.count))
        if len(found) < self.count:
            raise DataError(
                f"no more than {len(found)} of {self.count} batches are without duplicates; lower the batch."
            )
        return np.array(found, np.int64).reshape(self.count, self._size)

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

    def _most_frequent(self) -> tuple[int, int]:
        """Return the text of most rows, and the number of these rows."""
        counts = Counter(text for _, texts in self._offer(np.arange(len(self._rows))) for text in texts)
        return counts.most_common(1)[0]
