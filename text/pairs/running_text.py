"""Pairs in running text: neighbours, a sentence with itself, and blocks of a document."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.freezing import in_mode
from dipole.text.config import TextSettings
from dipole.text.encoders.batch import make_batch
from dipole.text.encoders.networks import SentenceModel
from dipole.text.pairs.base import PairKind, TextBatch, example_rows, under_masks


class WindowPairs(PairKind):
    """Consecutive sentences. The neighbours of one are its positives (Quick Thoughts, Logeswaran & Lee 2018)."""

    name = "window"

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        size = self.batch_size
        order, offset = np.arange(self.steps_per_epoch), 0
        if self.config.order == "shuffled":
            draw = self.seed.numpy("data", epoch)
            order = draw.permutation(order)
            # Batches begin elsewhere in every epoch, so that no pair of neighbours is always divided.
            offset = int(draw.integers(self.available - self.steps_per_epoch * size + 1))

        def rows(place: int) -> np.ndarray:
            start = offset + order[place] * size
            return self.train_rows[start : start + size]

        return rows

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        f, g = model(batch.batch)
        rows = {"f": f, "g": g, "document": batch.document, "index": batch.index}
        relate = partial(pair_neighbours, window=self.config.window, self_logit=self.config.self_logit)
        return EncodedBatch(rows, relate)

    @staticmethod
    def example(objective: Composite, dim: int, config: TextSettings, count: int) -> Pairs:
        rows = {**example_rows(count), "f": torch.randn(count, dim), "g": torch.randn(count, dim)}
        return pair_neighbours(rows, config.window, config.self_logit)


def pair_neighbours(rows: dict[str, Tensor], window: int, self_logit: Literal["zero", "drop"]) -> Pairs:
    """Pair each sentence with the sentences of its document in a window."""
    document = rows["document"]
    return Pairs.from_window(rows["f"], rows["g"], document, window, self_logit, labels=document, index=rows["index"])


class ViewPairs(PairKind):
    """Sentences in any order, each encoded twice under its own dropout mask (SimCSE, Gao et al. 2021, Eq. 4)."""

    name = "views"
    has_held_out = False

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        drawn, size = self.order(epoch, 0, self.available), self.batch_size
        return lambda place: self.train_rows[drawn[place * size : (place + 1) * size]]

    def batch(self, rows: np.ndarray, mine: slice, epoch: int, place: int) -> TextBatch:
        masks = self.row_masks(2, len(rows), mine, epoch, place)
        return replace(super().batch(rows, mine, epoch, place), masks=masks)

    def ids(self, rows: np.ndarray) -> list[np.ndarray]:
        return super().ids(rows) * 2

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        f, _ = model(batch.batch)
        first, second = under_masks([*f.chunk(2)], batch, model)
        rows = {"first": first, "second": second, "document": batch.document, "index": batch.index}
        return EncodedBatch(rows, pair_views)

    def check(self, model: SentenceModel) -> Sequence[str]:
        config = self.config
        if config.transformer is None:
            return []  # the settings say how it drops
        batch = make_batch(self.ids(self.train_rows[:8]), 1)
        with in_mode(True, model), torch.random.fork_rng(), torch.no_grad():
            first, second = model(batch)[0].chunk(2)
        if torch.equal(first, second):
            fix = "Set text.dropout, for example 0.1."
            if config.dropout:
                fix = "It has no layer for text.dropout either: take other text.pairs, or another transformer."
            raise ConfigError(
                f"text.transformer = {config.transformer!r} has no dropout, and views differ by their dropout masks "
                f"alone: both would be the same. {fix}"
            )
        return []

    @staticmethod
    def example(objective: Composite, dim: int, config: TextSettings, count: int) -> Pairs:
        return pair_views({**example_rows(count), "first": torch.randn(count, dim), "second": torch.randn(count, dim)})


def pair_views(rows: dict[str, Tensor]) -> Pairs:
    """Pair the two passes of each sentence. The second passes of the others are negatives."""
    return Pairs.cross(rows["first"], rows["second"], labels=rows["document"], index=rows["index"])


class BlockPairs(PairKind):
    """Blocks of a sentence and its b positives, consecutive or any of a document (Arora et al. 2019)."""

    name = "blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        self.size = self.unit(config)
        self.random: ClassBlocks | None = None
        document = self.data.owners(self.train_rows)
        if config.blocks == "random":
            self.random = ClassBlocks(document, self.size, config.block_count, self.seed)
            self.available = len(self.random)
            self.steps_per_epoch = self.available // self.batch_size
            return
        starts = np.flatnonzero(document[: max(0, len(document) - self.size + 1)] == document[self.size - 1 :])
        if not len(starts):
            raise DataError(
                f"no document of {config.corpus} has {self.size} sentences for a block. Lower text.block_size"
            )
        # For each document with a block, the positions in `train_rows` at which one starts.
        self.starts = np.split(starts, np.flatnonzero(np.diff(document[starts])) + 1)

    @staticmethod
    def unit(config: TextSettings) -> int:
        return config.block_size + 1

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        size = self.batch_size
        if self.random is not None:
            rows = self.train_rows[self.random.rows(epoch)]
            return lambda place: rows[place * size : (place + 1) * size]

        def consecutive(place: int) -> np.ndarray:
            """Draw the document of each block, then where it starts."""
            draw = self.seed.numpy("data", epoch, "blocks", place)
            owners = draw.integers(len(self.starts), size=size // self.size)
            starts = np.array([draw.choice(self.starts[owner]) for owner in owners])
            return self.train_rows[(starts[:, None] + np.arange(self.size)).ravel()]

        return consecutive

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        f, _ = model(batch.batch)
        first = slice(None, None, self.size)
        rows = {"x": f.view(-1, self.size, f.shape[1]), "labels": batch.document[first], "index": batch.index[first]}
        return EncodedBatch(rows, partial(pair_blocks, draw=batch.seed))

    @staticmethod
    def example(objective: Composite, dim: int, config: TextSettings, count: int) -> Pairs:
        size = BlockPairs.unit(config)
        blocks = count // size
        rows = {name: values[::size][:blocks] for name, values in example_rows(count).items()}
        return pair_blocks({"x": torch.randn(blocks, size, dim), "labels": rows["document"], "index": rows["index"]}, 0)


def pair_blocks(rows: dict[str, Tensor], draw: int) -> Pairs:
    return Pairs.from_blocks(rows["x"], anchors="all", labels=rows["labels"], index=rows["index"], draw=draw)


def check_blocks(config: TextSettings, batch_size: int, world_size: int) -> None:
    """Raise ConfigError if a batch does not hold complete blocks for every rank."""
    if config.pairs != "blocks":
        return
    unit = BlockPairs.unit(config)
    blocks, rest = divmod(batch_size, unit)
    if rest or blocks < world_size:
        raise ConfigError(
            f"train.batch_size {batch_size} must be a multiple of {unit}, the sentences of a block "
            f"(text.block_size {config.block_size} and the one whose positives they are), with a block for each "
            f"of the {world_size} processes; the nearest: {unit * max(round(batch_size / unit), world_size)}"
        )
