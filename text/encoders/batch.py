"""Batches of sentences of unequal length: chunks of similar length, and the order to put them back in."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Sentences of similar length, longest first, padded on the right with 0."""

    ids: Tensor  # (b, T) long
    lengths: Tensor  # (b,) long, on the CPU, falling, >= 1
    sent: Tensor | None = None  # the lengths on the device of the ids, where `to` has sent them

    def mask(self) -> Tensor:
        """True on tokens, (b, T)."""
        lengths = self.sent
        if lengths is None:
            lengths = self.lengths.to(self.ids.device)
        return torch.arange(self.ids.shape[1], device=self.ids.device) < lengths[:, None]

    def pin_memory(self) -> "Chunk":
        return Chunk(self.ids.pin_memory(), self.lengths.pin_memory())

    def to(self, device: torch.device | str) -> "Chunk":
        return Chunk(self.ids.to(device, non_blocking=True), self.lengths, self.lengths.to(device, non_blocking=True))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, size: int) -> "list[Chunk]":
        """Consecutive sentences, `size` at a time, as wide as they were."""
        if self.sent is None:
            return [Chunk(*part) for part in zip(self.ids.split(size), self.lengths.split(size), strict=True)]
        columns = (self.ids, self.lengths, self.sent)
        return [Chunk(*part) for part in zip(*(column.split(size) for column in columns), strict=True)]


@dataclass(frozen=True)
class Batch:
    """Chunks, and for each sentence its place among their rows: `rows[order]` is the order of the sentences."""

    chunks: list[Chunk]
    order: Tensor  # (B,) long

    def __len__(self) -> int:
        return len(self.order)

    def pin_memory(self) -> "Batch":
        """The same in memory that a CUDA device can fetch while the host goes on."""
        return Batch([chunk.pin_memory() for chunk in self.chunks], self.order.pin_memory())

    def to(self, device: torch.device | str) -> "Batch":
        return Batch([chunk.to(device) for chunk in self.chunks], self.order.to(device, non_blocking=True))
