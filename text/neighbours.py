"""Measure held-out running text: the next sentence, distances of neighbours, nearest sentences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.diagnostics import pair_histogram
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import normalize


@dataclass(frozen=True)
class Histogram:
    """Shares of the distances D = (1 - cos) / 2 per bin: of neighbours ("correct") and of all others ("incorrect")."""

    edges: np.ndarray  # (bins + 1,)
    correct: np.ndarray  # (bins,)
    incorrect: np.ndarray  # (bins,)


def next_sentence(f: Tensor, g: Tensor, document: Tensor) -> dict[str, float]:
    """Rank the next sentence among all held-out ones by the cosine of f(sentence) and g(candidate).

    Args:
        f, g: (n, d) of consecutive sentences. document: (n,). The last sentence of a document is no query.

    Returns:
        "next@1" and "next@10", shares of queries whose next sentence ranks first or among ten (the sentence itself is
        no candidate), "next_mrr", the mean of 1 / rank, and "chance@1".
    """
    document = document.to(f.device)
    queries = torch.nonzero(document[:-1] == document[1:]).squeeze(1)
    if not len(queries):
        return {}
    scores = normalize(f[queries].float()) @ normalize(g.float()).T
    scores[torch.arange(len(queries), device=f.device), queries] = -torch.inf
    truth = scores.gather(1, (queries + 1)[:, None])
    rank = (scores > truth).sum(1) + 1
    return {
        "next@1": float((rank == 1).float().mean()),
        "next@10": float((rank <= 10).float().mean()),
        "next_mrr": float((1 / rank).mean()),
        "chance@1": 1 / (len(f) - 1),
    }


def neighbour_histogram(f: Tensor, g: Tensor, document: Tensor, bins: int = 50) -> Histogram:
    """Return distances of f(sentence) to g of its neighbours, and to g of all other sentences (LMCL, Fig. 5)."""
    found = pair_histogram(Pairs.from_window(f, g, document.to(f.device)), bins)
    shares = [(counts / counts.sum().clamp_min(1)).numpy() for counts in (found.correct, found.incorrect)]
    return Histogram(found.edges.numpy(), *shares)


def nearest_sentences(queries: Sequence[int], vectors: Tensor, texts: Sequence[str], count: int = 5) -> str:
    """Return text with the sentences nearest to each query (an index into `texts`), by cosine."""
    x = normalize(vectors.float())
    lines = []
    for query in queries:
        scores = x @ x[query]
        scores[query] = -torch.inf
        best = scores.topk(min(count, len(texts) - 1))
        lines.append(f"{texts[query]}")
        lines += [f"  {float(s):.3f}  {texts[int(i)]}" for s, i in zip(best.values, best.indices, strict=True)]
    return "\n".join(lines)
