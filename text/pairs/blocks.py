"""Blocks of sentences of one document: the members of a block are positives of each other (Arora et al. 2019)."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import ConfigError, DataError
from dipole.text.config import TextSettings
from dipole.text.encoders.networks import SentenceModel
from dipole.text.pairs.base import PairKind, RunForPairs, TextBatch, example_rows


class BlockPairs(PairKind):
    """Batches of blocks of a sentence and its b positives, consecutive or of any sentences of a document."""

    name = "blocks"

    def __init__(self, setting: RunForPairs) -> None:
        super().__init__(setting)
        self.size = self.unit(setting.config)
        self.random: ClassBlocks | None = None
        document = setting.data.owners(setting.train_rows)
        if setting.config.blocks == "random":
            self.random = ClassBlocks(document, self.size, setting.config.block_count, setting.seed)
            self.available = len(self.random)
            self.steps_per_epoch = self.available // setting.batch_size
            return
        starts = np.flatnonzero(document[: max(0, len(document) - self.size + 1)] == document[self.size - 1 :])
        if not len(starts):
            raise DataError(
                f"no document of {setting.config.corpus} has {self.size} sentences for a block. Lower text.block_size"
            )
        # For each document with a block, the positions in `train_rows` at which one starts.
        self.starts = np.split(starts, np.flatnonzero(np.diff(document[starts])) + 1)

    @staticmethod
    def unit(config: TextSettings) -> int:
        return config.block_size + 1

    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        setting, size = self.setting, self.setting.batch_size
        if self.random is not None:
            rows = setting.train_rows[self.random.rows(epoch)]
            return lambda place: rows[place * size : (place + 1) * size]

        def consecutive(place: int) -> np.ndarray:
            """Draw the document of each block, then where it starts."""
            draw = setting.seed.numpy("data", epoch, "blocks", place)
            owners = draw.integers(len(self.starts), size=size // self.size)
            starts = np.array([draw.choice(self.starts[owner]) for owner in owners])
            return setting.train_rows[(starts[:, None] + np.arange(self.size)).ravel()]

        return consecutive

    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        f, _ = model(batch.batch)
        first = slice(None, None, self.size)
        rows = {"x": f.view(-1, self.size, f.shape[1]), "labels": batch.document[first], "index": batch.index[first]}
        return EncodedBatch(rows, partial(members, draw=batch.seed))

    @staticmethod
    def example(config: TextSettings, count: int, dim: int) -> Pairs:
        size = BlockPairs.unit(config)
        blocks = count // size
        rows = {name: values[::size][:blocks] for name, values in example_rows(count).items()}
        return members({"x": torch.randn(blocks, size, dim), "labels": rows["document"], "index": rows["index"]}, 0)


def members(rows: dict[str, Tensor], draw: int) -> Pairs:
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
