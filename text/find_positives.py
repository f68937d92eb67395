"""Find the positive of each anchor of a table among all texts."""

import torch
from torch import Tensor

from dipole.core.objectives.similarity import normalize

CHUNK = 256  # anchors whose scores are held at once


def find_positives(f: Tensor, g: Tensor, anchor: Tensor, positive: Tensor, negatives: Tensor) -> dict[str, float]:
    """Rank the positive of every row among all positives and negatives, by cosine.

    Args:
        f, g: (t, d) of distinct texts as anchors and as candidates. anchor, positive: (n,) numbers of texts.
        negatives: (n, m) the same, negative numbers where a row has fewer.

    Returns:
        "positive@1" and "positive@10", shares of rows whose positive ranks first or among ten (the anchor's own text
        and its other positives are no candidates), "positive_mrr", the mean of 1 / rank, and "chance@1". With
        negatives also "triplet/accuracy", the share of negatives that are farther from the anchor than the positive.
    """
    f, g = normalize(f.float()), normalize(g.float())
    anchor, positive, negatives = (texts.to(f.device) for texts in (anchor, positive, negatives))
    there = negatives >= 0
    candidates = torch.cat([positive, negatives[there]]).unique()
    numbers = torch.arange(len(candidates), device=g.device)
    column = torch.full((len(g),), -1, device=g.device).index_copy(0, candidates, numbers)
    ranks, nearer = [], []
    for start in range(0, len(anchor), CHUNK):
        rows = slice(start, start + CHUNK)
        own, wanted = anchor[rows], column[positive[rows]]
        scores = f[own] @ g[candidates].T
        truth = scores.gather(1, wanted[:, None])
        triplet = (f[own][:, None] * g[negatives[rows].clamp_min(0)]).sum(2)
        nearer.append((truth > triplet)[there[rows]])
        # The anchor itself and its other positives are no wrong answers.
        same = own[:, None] == anchor
        line, other = same.nonzero(as_tuple=True)
        scores[line, column[positive[other]]] = -torch.inf
        itself = column[own]
        scores[itself >= 0, itself[itself >= 0]] = -torch.inf
        ranks.append((scores > truth).sum(1) + 1)
    rank = torch.cat(ranks)
    results = {
        "positive@1": float((rank == 1).float().mean()),
        "positive@10": float((rank <= 10).float().mean()),
        "positive_mrr": float((1 / rank).mean()),
        "chance@1": 1 / len(candidates),
    }
    won = torch.cat(nearer)
    return results | ({"triplet/accuracy": float(won.float().mean())} if len(won) else {})
