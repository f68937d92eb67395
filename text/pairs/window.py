"""Consecutive sentences: the neighbours of a sentence are its positives (Quick Thoughts, Logeswaran & Lee 2018)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.text.config import TextSettings
from dipole.text.encoders.networks import SentenceModel
from dipole.text.pairs.base import PairKind, TextBatch, example_rows


class WindowPairs(PairKind):
    """Batches of consecutive sentences of the corpus."""

    name = "window"

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        setting, size = self.setting, self.setting.batch_size
        order, offset = np.arange(self.steps_per_epoch), 0
        if setting.config.order == "shuffled":
            draw = setting.seed.numpy("data", epoch)
            order = draw.permutation(order)
            # Batches begin elsewhere in every epoch, so that no pair of neighbours is always divided.
            offset = int(draw.integers(self.available - self.steps_per_epoch * size + 1))

        def rows(place: int) -> np.ndarray:
            start = offset + order[place] * size
            return setting.train_rows[start : start + size]

        return rows

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        f, g = model(batch.batch)
        rows = {"f": f, "g": g, "document": batch.document, "index": batch.index}
        config = self.setting.config
        return EncodedBatch(rows, partial(neighbours, window=config.window, self_logit=config.self_logit))

    @staticmethod
    def example(config: TextSettings, count: int, dim: int) -> Pairs:
        rows = {**example_rows(count), "f": torch.randn(count, dim), "g": torch.randn(count, dim)}
        return neighbours(rows, config.window, config.self_logit)


def neighbours(rows: dict[str, Tensor], window: int, self_logit: Literal["zero", "drop"]) -> Pairs:
    """Pair each sentence with the sentences of its document in a window."""
    document = rows["document"]
    return Pairs.from_window(rows["f"], rows["g"], document, window, self_logit, labels=document, index=rows["index"])
