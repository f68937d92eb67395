"""Retrieval on test pairs: find the positive of an image or a caption among all others."""

import torch
from torch import Tensor

from dipole.core.objectives.similarity import normalize
from dipole.core.utils.finite import finite_rows

CHUNK = 512  # queries at a time
RANKS = (1, 5, 10)


def recall(a: Tensor, b: Tensor, ids: Tensor, same_kind: bool = False) -> dict[str, float]:
    """Find a positive of every distinct query among the distinct candidates, by cosine.

    recall@k is the share of queries with a positive among the k nearest. Ties count as found. A query has as many
    positives as there are rows (an image with five captions has five), as in the protocol of COCO retrieval.

    Args:
        a, b: (n, d) queries and candidates, row by row.
        ids: (n, 2) number of each row's query and candidate. Rows with the same number have the same vector.
        same_kind: both columns number the same items, so the query itself may be a candidate. It does not count.

    Returns:
        "recall@1", "recall@5", "recall@10", and "chance@1", the recall@1 of a random order.

    Raises:
        DataError: a vector is not finite.
    """
    queries, of_query, query = _distinct(ids[:, 0])
    candidates, of_candidate, candidate = _distinct(ids[:, 1])
    f, g = _unit(a[of_query]), _unit(b[of_candidate])
    ranks, positives = [], []
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        scores = f[start:stop] @ g.T
        mine = (query >= start) & (query < stop)
        right = torch.zeros_like(scores, dtype=torch.bool)
        right[query[mine] - start, candidate[mine]] = True
        if same_kind:
            itself = (ids[of_query[start:stop], 0].unsqueeze(1) == ids[of_candidate, 1]).to(scores.device)
            scores = scores.masked_fill(itself & ~right, -torch.inf)
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        ranks.append(1 + ((scores > best) & ~right).sum(1))
        positives.append(right.sum(1))
    rank, chance = torch.cat(ranks), torch.cat(positives).double().mean() / candidates
    return {**{f"recall@{k}": float((rank <= k).double().mean()) for k in RANKS}, "chance@1": float(chance)}


def _unit(vectors: Tensor) -> Tensor:
    return normalize(finite_rows(vectors.float(), "embeddings"))


def _distinct(numbers: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the count of distinct numbers, a row with each, and the index of each row's number."""
    values, inverse = numbers.unique(return_inverse=True)
    row = torch.zeros(len(values), dtype=torch.long)
    row[inverse] = torch.arange(len(numbers))
    return len(values), row, inverse


def zero_shot(images: Tensor, captions: Tensor, labels: Tensor) -> float:
    """Return the share of images (n, d) nearest to the caption (C, d) of their class by cosine, with labels (n,).

    Raises DataError for a vector that is not finite.
    """
    nearest = (_unit(images) @ _unit(captions).T).argmax(1)
    return float((nearest == labels.to(nearest.device)).double().mean())
