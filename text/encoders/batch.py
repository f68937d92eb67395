"""Batches of sentences of unequal length: chunks of similar length, and the order to put them back in."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Sentences of similar length, longest first, padded on the right with 0."""

    ids: Tensor  # (b, T) long
    lengths: Tensor  # (b,) long, on the CPU, falling, >= 1

    def mask(self) -> Tensor:
        """True on tokens, (b, T)."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths.to(self.ids.device)[:, None]

    def to(self, device: torch.device | str) -> "Chunk":
        return Chunk(self.ids.to(device, non_blocking=True), self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, size: int) -> "list[Chunk]":
        """Consecutive sentences, `size` at a time, as wide as they were."""
        return [Chunk(*part) for part in zip(self.ids.split(size), self.lengths.split(size), strict=True)]


@dataclass(frozen=True)
class Batch:
    """Chunks, and for each sentence its place among their rows: `rows[order]` is the order of the sentences."""

    chunks: list[Chunk]
    order: Tensor  # (B,) long

    def __len__(self) -> int:
        return len(self.order)

    def to(self, device: torch.device | str) -> "Batch":
        return Batch([chunk.to(device) for chunk in self.chunks], self.order.to(device))
