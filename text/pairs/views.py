"""A sentence and itself under another dropout mask (SimCSE, Gao et al. 2021, Eq. 4)."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError
from dipole.text.config import TextSettings
from dipole.text.encoders.batch import make_batch
from dipole.text.encoders.networks import SentenceModel
from dipole.text.model import never_differs
from dipole.text.pairs.base import PairKind, TextBatch, example_rows, under_masks


class ViewPairs(PairKind):
    """Batches of single sentences in any order, each encoded twice in one pass."""

    name = "views"
    has_held_out = False

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        setting, size = self.setting, self.setting.batch_size
        drawn = setting.order(epoch, 0, self.available)
        return lambda place: setting.train_rows[drawn[place * size : (place + 1) * size]]

    def batch(self, rows: np.ndarray, mine: slice, epoch: int, place: int) -> TextBatch:
        masks = self.setting.row_masks(2, len(rows), mine, epoch, place)
        return replace(super().batch(rows, mine, epoch, place), masks=masks)

    def ids(self, rows: np.ndarray) -> list[np.ndarray]:
        return super().ids(rows) * 2

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        f, _ = model(batch.batch)
        first, second = under_masks([*f.chunk(2)], batch, model)
        return EncodedBatch({"first": first, "second": second, "document": batch.document, "index": batch.index}, views)

    def check(self, model: SentenceModel) -> None:
        config = self.setting.config
        if config.transformer is None:
            return  # the settings say how it drops
        if never_differs(model, make_batch(self.ids(self.setting.train_rows[:8]), 1)):
            fix = "Set text.dropout, for example 0.1."
            if config.dropout:
                fix = "It has no layer for text.dropout either: take other text.pairs, or another transformer."
            raise ConfigError(
                f"text.transformer = {config.transformer!r} has no dropout, and views differ by their dropout masks "
                f"alone: both would be the same. {fix}"
            )

    @staticmethod
    def example(config: TextSettings, count: int, dim: int) -> Pairs:
        return views({**example_rows(count), "first": torch.randn(count, dim), "second": torch.randn(count, dim)})


def views(rows: dict[str, Tensor]) -> Pairs:
    """Pair the two passes of each sentence. The second passes of the others are negatives."""
    return Pairs.cross(rows["first"], rows["second"], labels=rows["document"], index=rows["index"])
