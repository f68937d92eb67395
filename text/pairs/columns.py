"""Rows of a pair table: an anchor finds its positive among all positives and hard negatives (SimCSE, Eq. 5)."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.text import encoders
from dipole.text.config import TextSettings
from dipole.text.data import TableData
from dipole.text.pairs.base import PairKind, Partners, Setting, TextBatch, under_masks
from dipole.text.pairs.batches import PairBatches


class Columns(PairKind):
    """Batches of rows of a table, by default without a text in common."""

    name = "columns"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert isinstance(setting.data, TableData)
        self.table = setting.data.table
        if self.steps_per_epoch:
            self.batches = PairBatches(
                self.table,
                setting.train_rows,
                setting.batch_size,
                setting.order,
                no_duplicates=setting.config.no_duplicates,
            )
            self.steps_per_epoch = self.batches.count
            self.notes = self.batches.notes()

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        return self.batches.epoch(epoch).__getitem__

    def batch(self, rows: np.ndarray, mine: slice, epoch: int, place: int) -> TextBatch:
        own, setting = rows[mine], self.setting
        partners = self._partners(rows, mine)
        return TextBatch(
            setting.send_batch(setting.data.sentences.ids(self.table.anchor[own])),
            setting.send(setting.data.owners(own)),
            setting.send(own.astype(np.int64)),
            setting.seed.stream("data", "negatives", epoch, place),
            setting.row_masks(2 + partners.most, len(rows), mine, epoch, place),
            partners,
        )

    def _partners(self, rows: np.ndarray, mine: slice) -> Partners:
        present = self.table.negatives[rows] >= 0  # (B, m), True on the left
        most = int(present.sum(1).max(initial=0))
        own = rows[mine]
        hard = self.table.negatives[own, :most]
        ids = np.concatenate([self.table.positive[own], hard[hard >= 0]])
        setting = self.setting
        absent = None
        if not present[:, :most].all():
            absent = setting.send(np.flatnonzero(~present[:, :most].T.ravel()) + len(rows))
        return Partners(
            setting.send_batch(setting.data.sentences.ids(ids)),
            setting.send(np.flatnonzero(hard >= 0)),
            most,
            absent,
            self._weights(own),
        )

    def _weights(self, rows: np.ndarray) -> Tensor | None:
        if self.table.weights is None:
            return None
        return self.setting.send(self.table.weights[rows])

    def embed(self, model: encoders.SentenceModel, batch: TextBatch) -> EncodedBatch:
        partners = batch.partners
        assert partners is not None  # `batch` makes them
        anchor = _vectors(model.f, batch.batch)
        others = _vectors(model.sides()[-1], partners.batch)
        count, most, width = len(anchor), partners.most, others.shape[1]
        hard = others.new_zeros(count * most, width).index_copy(0, partners.place, others[count:])
        vectors = [anchor, others[:count], *hard.view(count, most, width).unbind(1)]
        anchor, positive, *negatives = under_masks(vectors, batch, model)
        rows = {"anchor": anchor, "positive": positive, "index": batch.index}
        if negatives:
            rows["negatives"] = torch.stack(negatives, 1)
        if partners.weights is not None:
            rows["weights"] = partners.weights
        return EncodedBatch(rows, partial(columns, absent=partners.absent))

    @staticmethod
    def example(config: TextSettings, count: int, dim: int) -> Pairs:
        hard = 1
        if config.columns is not None:
            hard = len(config.columns) - 2
        rows = {name: torch.randn(count, dim) for name in ("anchor", "positive")}
        rows["index"] = torch.arange(count)
        if hard:
            rows["negatives"] = torch.randn(count, hard, dim)
        return columns(rows, None)


def _vectors(part: encoders.Part, batch: encoders.Batch) -> Tensor:
    """Return the vectors (B, d) of one encoder, in the order of the batch."""
    return torch.cat([part(chunk) for chunk in batch.chunks])[batch.order]


def columns(rows: dict[str, Tensor], absent: Tensor | None) -> Pairs:
    """Pair anchors with their positives. `absent` (E,) are the places c B + b where row b has no text in column c."""
    if absent is not None:
        absent = absent.expand(len(rows["anchor"]), -1)
    return Pairs.from_columns(
        rows["anchor"],
        rows["positive"],
        rows.get("negatives"),
        index=rows["index"],
        ignored=absent,
        weights=rows.get("weights"),
    )
