"""Batches of sentences of unequal length: chunks of similar length, and the order to put them back in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
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
        lengths = self.sent if self.sent is not None else self.lengths.to(self.ids.device)
        return torch.arange(self.ids.shape[1], device=self.ids.device) < lengths[:, None]

    def to(self, device: torch.device | str) -> "Chunk":
        return Chunk(_sent(self.ids, device), self.lengths, _sent(self.lengths, device))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, size: int) -> "list[Chunk]":
        """Consecutive sentences, `size` at a time, as wide as they were."""
        columns = [each for each in (self.ids, self.lengths, self.sent) if each is not None]
        return [Chunk(*part) for part in zip(*(column.split(size) for column in columns), strict=True)]


@dataclass(frozen=True)
class TokenBatch:
    """Chunks, and for each sentence its place among their rows: `rows[order]` is the order of the sentences."""

    chunks: list[Chunk]
    order: Tensor  # (B,) long

    def to(self, device: torch.device | str) -> "TokenBatch":
        return TokenBatch([chunk.to(device) for chunk in self.chunks], _sent(self.order, device))


def _sent(values: Tensor, device: torch.device | str) -> Tensor:
    """Send a tensor of the CPU. Copies to CUDA are asynchronous, through pinned memory."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def pad(sentences: Sequence[Sequence[int] | np.ndarray]) -> Chunk:
    """Pad sentences that are sorted by falling length."""
    lengths = np.array([len(ids) for ids in sentences], dtype=np.int64)
    matrix = np.zeros((len(sentences), int(lengths[0])), dtype=np.int64)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = np.concatenate([np.asarray(ids) for ids in sentences])
    return Chunk(torch.from_numpy(matrix), torch.from_numpy(lengths))


def make_batch(sentences: Sequence[Sequence[int] | np.ndarray], chunks: int = 4) -> TokenBatch:
    """Sort by length and cut into at most `chunks` chunks of nearly equal numbers of tokens."""
    lengths = np.array([len(ids) for ids in sentences])
    falling = np.argsort(-lengths, kind="stable")
    total = np.cumsum(lengths[falling])
    cuts = np.searchsorted(total, total[-1] * np.arange(1, chunks) / chunks) + 1
    bounds = np.unique([0, *cuts.clip(max=len(falling)), len(falling)])
    parts = [pad([sentences[i] for i in falling[a:b]]) for a, b in pairwise(bounds)]
    order = np.empty_like(falling)
    order[falling] = np.arange(len(falling))
    return TokenBatch(parts, torch.from_numpy(order))


def by_tokens(lengths: Sequence[int] | np.ndarray, budget: int, most: int = 1024) -> Iterator[np.ndarray]:
    """Yield groups of indices, shortest sentences first, each within `budget` padded tokens (at least one sentence)."""
    rising = np.argsort(np.asarray(lengths), kind="stable")
    start = 0
    for end in range(1, len(rising)):
        if (end - start + 1) * int(lengths[rising[end]]) > budget or end - start >= most:
            yield rising[start:end]
            start = end
    if len(rising):
        yield rising[start:]
