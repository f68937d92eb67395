"""Batches of sentences of unequal length: chunks of similar length, so that little is computed for padding."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from dipole.text.encoders.batch import Batch, Chunk


def pad(sentences: Sequence[Sequence[int] | np.ndarray]) -> Chunk:
    """Pad sentences that are sorted by falling length."""
    lengths = np.array([len(ids) for ids in sentences], dtype=np.int64)
    matrix = np.zeros((len(sentences), int(lengths[0])), dtype=np.int64)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = np.concatenate([np.asarray(ids) for ids in sentences])
    return Chunk(torch.from_numpy(matrix), torch.from_numpy(lengths))


def make_batch(sentences: Sequence[Sequence[int] | np.ndarray], chunks: int = 4) -> Batch:
    """Sort by length and cut into at most `chunks` chunks of nearly equal numbers of tokens.

    The sentences of a batch stay together, because their neighbourhood is learned. Only the order of computation
    changes.
    """
    lengths = np.array([len(ids) for ids in sentences])
    falling = np.argsort(-lengths, kind="stable")
    total = np.cumsum(lengths[falling])
    cuts = np.searchsorted(total, total[-1] * np.arange(1, chunks) / chunks) + 1
    bounds = np.unique([0, *cuts.clip(max=len(falling)), len(falling)])
    parts = [pad([sentences[i] for i in falling[a:b]]) for a, b in pairwise(bounds)]
    order = np.empty_like(falling)
    order[falling] = np.arange(len(falling))
    return Batch(parts, torch.from_numpy(order))


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
