"""Rows of a pair table: an anchor finds its positive among all positives and hard negatives (SimCSE, Eq. 5)."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted
from dipole.text.config import TextSettings
from dipole.text.data import TableData
from dipole.text.encoders.networks import SentenceModel
from dipole.text.pairs.base import PairKind, Partners, TextBatch, under_masks

TRIES = 20  # orders that are tried before a batch without duplicates counts as impossible
TOGETHER = 10_000  # rows whose texts are looked up together
Row = tuple[int, tuple[int, ...]]  # the number of a row and those of its different texts


class ColumnPairs(PairKind):
    """Batches of rows of a table, by default without a text in common.

    The batches of an epoch depend on seed and epoch alone and are the same on every rank. An epoch has as many as the
    first order fills. If a later one fills fewer, rows are drawn again.
    """

    name = "columns"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.data, TableData)
        self.table = self.data.table
        if not self.config.no_duplicates or not self.steps_per_epoch:
            return
        counts = (sum(1 for _ in self._cut(0, tried)) for tried in range(TRIES))
        self.steps_per_epoch = next(filter(None, counts), 0)
        if not self.steps_per_epoch:
            raise DataError(
                f"no {self.batch_size} of the {counted(self.available, 'row')} are without a text in common, and in a "
                f"batch it would be a negative of itself ({self._most_frequent()}). Lower train.batch_size, or set "
                f"text.no_duplicates = false."
            )

    def check(self, model: SentenceModel) -> Sequence[str]:
        """Warn if rows are left out because they share texts, beyond an incomplete last batch."""
        left_out = self.available - self.steps_per_epoch * self.batch_size
        if left_out < self.batch_size:
            return []
        return [
            f"text.no_duplicates leaves out {left_out} of {counted(self.available, 'row')} in each epoch, because "
            f"they share texts with others ({self._most_frequent()}). Lower train.batch_size, remove duplicates, or "
            f"set text.no_duplicates = false"
        ]

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        orders = (self._cut(epoch, tried) for tried in range(TRIES * max(1, self.steps_per_epoch)))
        found = list(islice(chain.from_iterable(orders), self.steps_per_epoch))
        if len(found) < self.steps_per_epoch:
            raise DataError(
                f"no more than {len(found)} of {self.steps_per_epoch} batches are without duplicates. Lower the batch."
            )
        return found.__getitem__

    def _cut(self, epoch: int, tried: int) -> Iterator[np.ndarray]:
        order = self.order(epoch, tried, self.available)
        if self.config.no_duplicates:
            for batch in without_duplicates(self._offer(order), self.batch_size):
                yield self.train_rows[batch]
        else:
            size = self.batch_size
            yield from self.train_rows[order[: self.steps_per_epoch * size]].reshape(self.steps_per_epoch, size)

    def _offer(self, order: np.ndarray) -> Iterator[Row]:
        for start in range(0, len(order), TOGETHER):
            part = order[start : start + TOGETHER]
            for row, numbers in zip(part.tolist(), self.table.numbers_of(self.train_rows[part]).tolist(), strict=True):
                yield row, tuple(dict.fromkeys(text for text in numbers if text >= 0))

    def _most_frequent(self) -> str:
        """Return the text of most rows, and the number of these rows."""
        counts = Counter(text for _, texts in self._offer(np.arange(self.available)) for text in texts)
        text, most = counts.most_common(1)[0]
        return f"{self.table.texts[text][:60]!r} stands in {counted(most, 'row')}"

    def batch(self, rows: np.ndarray, mine: slice, epoch: int, place: int) -> TextBatch:
        partners = self._partners(rows, mine)
        masks = self.row_masks(2 + partners.most, len(rows), mine, epoch, place)
        return replace(super().batch(rows, mine, epoch, place), masks=masks, partners=partners)

    def ids(self, rows: np.ndarray) -> list[np.ndarray]:
        return super().ids(self.table.anchor[rows])

    def _partners(self, rows: np.ndarray, mine: slice) -> Partners:
        present = self.table.negatives[rows] >= 0  # (B, m), True on the left
        most = int(present.sum(1).max(initial=0))
        own = rows[mine]
        hard = self.table.negatives[own, :most]
        sentences = self.data.sentences.ids(np.concatenate([self.table.positive[own], hard[hard >= 0]]))
        absent = np.flatnonzero(~present[:, :most].T.ravel()) + len(rows)
        weights = self.send(self.table.weights[own]) if self.table.weights is not None else None
        return Partners(
            self.send_batch(sentences),
            self.send(np.flatnonzero(hard >= 0)),
            most,
            self.send(absent) if len(absent) else None,
            weights,
        )

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        partners = batch.partners
        assert partners is not None  # `batch` makes them
        anchor, others = model.f.vectors(batch.batch), model.sides()[-1].vectors(partners.batch)
        count, most, width = len(anchor), partners.most, others.shape[1]
        hard = others.new_zeros(count * most, width).index_copy(0, partners.place, others[count:])
        vectors = [anchor, others[:count], *hard.view(count, most, width).unbind(1)]
        anchor, positive, *negatives = under_masks(vectors, batch, model)
        rows = {"anchor": anchor, "positive": positive, "index": batch.index}
        if negatives:
            rows["negatives"] = torch.stack(negatives, 1)
        if partners.weights is not None:
            rows["weights"] = partners.weights
        return EncodedBatch(rows, partial(pair_columns, absent=partners.absent))

    @staticmethod
    def example(objective: Composite, dim: int, config: TextSettings, count: int) -> Pairs:
        hard = len(config.columns) - 2 if config.columns is not None else 1
        rows = {name: torch.randn(count, dim) for name in ("anchor", "positive")}
        if hard:
            rows["negatives"] = torch.randn(count, hard, dim)
        return pair_columns({**rows, "index": torch.arange(count)}, None)


def pair_columns(rows: dict[str, Tensor], absent: Tensor | None) -> Pairs:
    """Pair anchors with their positives. `absent` (E,) are the places c B + b where row b has no text in column c."""
    if absent is not None:
        absent = absent.expand(len(rows["anchor"]), -1)
    hard, weights = rows.get("negatives"), rows.get("weights")
    return Pairs.from_columns(
        rows["anchor"], rows["positive"], hard, index=rows["index"], ignored=absent, weights=weights
    )


def without_duplicates(rows: Iterable[Row], size: int) -> Iterator[list[int]]:
    """Cut rows into batches in which no text occurs in two rows, as sentence-transformers' NO_DUPLICATES sampler does.

    A row that shares a text with one of the batch waits for a later batch, where waiting rows come first.
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
