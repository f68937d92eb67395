"""Rank held-out sentences: the next one, the positive of a table's row, and the nearest ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dipole.core.objectives.similarity import normalize

CHUNK = 256  # anchors whose scores are held at once


def next_sentence(f: Tensor, g: Tensor, document: Tensor) -> dict[str, float]:
    """Rank the next sentence among all held-out ones by the cosine of f(sentence) and g(candidate), both (n, d).

    The last sentence of a document is no query, the sentence itself no candidate.

    Returns:
        "next@1" and "next@10", shares of queries whose next sentence ranks first or among ten, "next_mrr", the mean of
        1 / rank, and "chance@1".
    """
    document = document.to(f.device)
    queries = torch.nonzero(document[:-1] == document[1:]).squeeze(1)
    if not len(queries):
        return {}
    scores = normalize(f[queries].float()) @ normalize(g.float()).T
    scores[torch.arange(len(queries), device=f.device), queries] = -torch.inf
    truth = scores.gather(1, (queries + 1)[:, None])
    return _rank_metrics("next", (scores > truth).sum(1) + 1, len(f) - 1)


def find_positives(f: Tensor, g: Tensor, anchor: Tensor, positive: Tensor, negatives: Tensor) -> dict[str, float]:
    """Rank the positive of every row among all positives and negatives, by cosine.

    The anchor's own text and its other positives are no candidates.

    Args:
        f, g: (t, d) of distinct texts as anchors and as candidates. anchor, positive: (n,) numbers of texts.
        negatives: (n, m) the same, negative numbers where a row has fewer.

    Returns:
        "positive@1" and "positive@10", shares of rows whose positive ranks first or among ten, "positive_mrr", the
        mean of 1 / rank, and "chance@1". With negatives also "triplet/accuracy", the share of negatives that are
        farther from the anchor than the positive.
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
    results = _rank_metrics("positive", torch.cat(ranks), len(candidates))
    won = torch.cat(nearer)
    if len(won):
        results["triplet/accuracy"] = float(won.float().mean())
    return results


def _rank_metrics(name: str, rank: Tensor, candidates: int) -> dict[str, float]:
    return {
        f"{name}@1": float((rank == 1).float().mean()),
        f"{name}@10": float((rank <= 10).float().mean()),
        f"{name}_mrr": float((1 / rank).mean()),
        "chance@1": 1 / candidates,
    }


def nearest_sentences(queries: Sequence[int], vectors: Tensor, texts: Sequence[str], count: int = 5) -> str:
    """Return text with the sentences nearest to each query (an index into `texts`), by cosine."""
    x = normalize(vectors.float())
    lines = []
    for query in queries:
        scores = x @ x[query]
        scores[query] = -torch.inf
        best = scores.topk(min(count, len(texts) - 1))
        lines.append(texts[query])
        lines += [f"  {float(s):.3f}  {texts[int(i)]}" for s, i in zip(best.values, best.indices, strict=True)]
    return "\n".join(lines)
