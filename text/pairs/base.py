"""The interface of a kind of pairs: which rows a batch holds, and who is whose positive."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import to_device
from dipole.text.config import TextSettings
from dipole.text.data import Data
from dipole.text.encoders.batch import TokenBatch, make_batch
from dipole.text.encoders.networks import SentenceModel


@dataclass(frozen=True)
class Partners:
    """Positives and hard negatives of the anchors of a table."""

    batch: TokenBatch  # B positives, then the negatives
    place: Tensor  # (k,) long, of each negative among B times `most`
    most: int  # negatives of a row of the global batch
    absent: Tensor | None  # (E,) long, places c B + b of the global batch without a negative, or None
    weights: Tensor | None = None  # (B,) of the pairs, from their labels


@dataclass(frozen=True)
class TextBatch:
    """The sentences of a step on this rank."""

    batch: TokenBatch
    document: Tensor  # (B,) long
    index: Tensor  # (B,) long, of each sentence in the corpus, or of each row of the table
    seed: int  # of this step's draws
    masks: Tensor | None = None  # (k, B, d) dropout of each of a row's k vectors, 0 or 1 / (1 - rate)
    partners: Partners | None = None


@dataclass
class PairKind(ABC):
    """One value of `text.pairs` in a run. A new kind is a subclass in this folder and an entry in `PAIR_KINDS`."""

    name: ClassVar[str]
    has_held_out: ClassVar[bool] = True  # held-out sentences have neighbours, or the rows of a table, as positives

    config: TextSettings
    data: Data
    train_rows: np.ndarray
    batch_size: int
    seed: Seeds
    device: torch.device
    width: int  # of the embeddings

    def __post_init__(self) -> None:
        self.available = len(self.train_rows)  # rows, or blocks times their size, that an epoch can use
        self.steps_per_epoch = self.available // self.batch_size

    def order(self, epoch: int, tried: int, count: int) -> np.ndarray:
        if self.config.order == "sequential":
            return np.arange(count)
        return self.seed.numpy("data", epoch, "rows", tried).permutation(count)

    def send(self, values: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values), self.device)

    def send_batch(self, ids: list[np.ndarray]) -> TokenBatch:
        return make_batch(ids, self.config.chunks).to(self.device)

    def row_masks(self, vectors: int, count: int, mine: slice, epoch: int, place: int) -> Tensor | None:
        """Draw dropout masks for `vectors` vectors of each row, for all ranks alike. None: nothing is dropped here."""
        rate = self.config.dropout
        if not rate or self.config.encoder == "transformer":  # the layers of a transformer drop by themselves
            return None
        generator = self.seed.torch("augment", "dropout", epoch, place)
        draw = torch.rand(vectors, count, self.width, generator=generator)
        return to_device((draw[:, mine] >= rate).float() / (1 - rate), self.device)

    @staticmethod
    def unit(config: TextSettings) -> int:
        """Return how many consecutive rows of a batch stay on one rank."""
        return 1

    @staticmethod
    @abstractmethod
    def example(objective: Composite, dim: int, config: TextSettings, count: int) -> Pairs:
        """Return random rows (count, dim) of a batch, paired."""

    @abstractmethod
    def rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        """Return a function from the place of a batch in an epoch to the rows of the global batch."""

    def batch(self, rows: np.ndarray, mine: slice, epoch: int, place: int) -> TextBatch:
        """Return this rank's share `mine` of a global batch."""
        own = rows[mine]
        return TextBatch(
            self.send_batch(self.ids(own)),
            self.send(self.data.owners(own)),
            self.send(own.astype(np.int64)),
            self.seed.stream("data", "negatives", epoch, place),
        )

    def ids(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the sentences of rows that `batch` encodes, as ids."""
        return self.data.sentences.ids(rows)

    @abstractmethod
    def embed(self, model: SentenceModel, batch: TextBatch) -> EncodedBatch:
        """Return the embeddings of a batch and how they are paired."""

    def check(self, model: SentenceModel) -> Sequence[str]:
        """Return warnings for the user. Raise ConfigError if the model cannot be trained on these pairs."""
        return []


def under_masks(vectors: list[Tensor], batch: TextBatch, model: SentenceModel) -> list[Tensor]:
    """Apply the dropout masks of a step to vectors (B, d)."""
    if batch.masks is None or not model.training:
        return vectors
    return [rows * mask.to(rows.dtype) for rows, mask in zip(vectors, batch.masks, strict=True)]


def example_rows(count: int) -> dict[str, Tensor]:
    """Return documents and indices of `count` sentences of two documents."""
    return {"document": torch.arange(count) * 2 // count, "index": torch.arange(count)}
