"""Data and helpers of the float64 references: pairs as plain lists of rows, and the arithmetic of vectors.

Embeddings are 1-d float64 tensors only so that autograd gives the gradient of the reference.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from dipole.core.objectives.pairs import Pairs

Vector = Tensor  # (d,) float64
Number = Tensor  # () float64


@dataclass(frozen=True)
class Case:
    """Anchors, candidates and their relations, as lists of plain rows.

    Args:
        anchors: A rows, (d,) float64 each.
        candidates: C rows, (d,) float64 each.
        positives: of each anchor, the indices of its positives among the candidates.
        ignored: of each anchor, candidates that are neither positives nor negatives.
        labels: class of each anchor.
        candidate_labels: class of each candidate.
        views: positives are views of the anchor's own instance, as `Pairs.views`.
        among: number of leading anchors that are candidates too.
        first_negative: candidates before this index are never negatives.
        of_block: anchors of each block, block after block. 0 without blocks.
        draw: seed of random choices among blocks.
        instances: instance of each anchor.
        others: candidates of another encoder than the anchors.
        candidate_instances: instance of each candidate.
        anchor_views: view of each anchor.
        anchor_runs: number of the run of each anchor. A run goes through the batch once.
        candidate_views: view of each candidate, -1 for none.
        queue: candidates that are past embeddings.
        queue_of_keys: the queue holds past candidates, not past anchors.
        view_pairs: anchors are view x of every pair of views x < y, and candidates are all views.
        side: number of leading anchors of the first of two encoders. 0 with one encoder.
        parameters: learned matrices by name, as lists of rows (d,). A number is a list of one ().
    """

    anchors: list[Vector]
    candidates: list[Vector]
    positives: list[list[int]]
    ignored: list[list[int]]
    labels: list[int] | None = None
    candidate_labels: list[int] | None = None
    views: bool = True
    among: int = 0
    first_negative: int = 0
    of_block: int = 0
    draw: int = 0
    instances: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    candidate_instances: list[int] | None = None
    anchor_views: list[int] = field(default_factory=list)
    anchor_runs: list[int] = field(default_factory=list)
    candidate_views: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    queue_of_keys: bool = False
    view_pairs: bool = False
    side: int = 0
    parameters: dict[str, list[Vector]] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Pairs, parameters: dict[str, Tensor] | None = None) -> Self:
        """Return a case with pairs and parameters as lists. Gradients flow back to the given tensors.

        Args:
            pairs: float64.
            parameters: by name, matrices (m, d) or numbers ().
        """
        views = pairs.candidate_view.tolist()
        of_anchors = {-1, *pairs.view.tolist()}
        strangers = [j for j, view in enumerate(views) if view == -1]
        return cls(
            anchors=list(pairs.anchors.unbind()),
            candidates=list(pairs.candidates.unbind()),
            positives=[[j for j in row if j >= 0] for row in pairs.positives.tolist()],
            ignored=[[j for j in row if j >= 0] for row in pairs.ignored.tolist()],
            labels=_plain(pairs.labels),
            candidate_labels=_plain(pairs.candidate_labels),
            views=pairs.views,
            among=pairs.facts.among,
            first_negative=pairs.first_negative,
            of_block=pairs.facts.of_block,
            draw=pairs.facts.draw,
            instances=_plain(pairs.index) or list(range(len(pairs.anchors))),
            others=[] if pairs.facts.view_pairs else [j for j, view in enumerate(views) if view not in of_anchors],
            candidate_instances=_plain(pairs.candidate_index),
            anchor_views=pairs.view.tolist(),
            anchor_runs=[number for number, (_, length) in enumerate(pairs.facts.anchor_views) for _ in range(length)],
            candidate_views=views,
            queue=strangers if pairs.facts.queue else [],
            queue_of_keys=pairs.facts.queue_of_keys,
            view_pairs=pairs.facts.view_pairs,
            side=len(pairs.anchors) // 2 if pairs.facts.sides else 0,
            parameters={name: list(torch.atleast_1d(value)) for name, value in (parameters or {}).items()},
        )

    def negatives(self, i: int) -> list[int]:
        """Return the indices of candidates that are neither positives of an anchor nor ignored for it, ascending.

        Args:
            i: index of the anchor.
        """
        out = set(self.positives[i]) | set(self.ignored[i])
        return [j for j in range(self.first_negative, len(self.candidates)) if j not in out]

    def all_but(self, positives: Sequence[int], i: int) -> list[int]:
        """Return candidates that are neither listed nor ignored for an anchor, ascending, ignoring `first_negative`.

        Args:
            positives: indices of candidates.
            i: index of the anchor.
        """
        return [j for j in range(len(self.candidates)) if j not in positives and j not in self.ignored[i]]

    def counted(self) -> list[int]:
        """Return the anchors with a positive, over which the mean runs."""
        return [i for i in range(len(self.anchors)) if self.positives[i]]

    def on_sphere(self) -> Self:
        """Return the case with all vectors at length 1. Zero vectors stay zero."""
        anchors, candidates = [unit(x) for x in self.anchors], [unit(x) for x in self.candidates]
        return replace(self, anchors=anchors, candidates=candidates)


def _plain(numbers: Tensor | None) -> list[int] | None:
    if numbers is None:
        return None
    found: list[int] = numbers.tolist()
    return found


def ramp(x: Number) -> Number:
    """Return max(x, 0)."""
    return x * (x > 0)


def dot(x: Vector, y: Vector) -> Number:
    return x @ y


def norm(x: Vector) -> Number:
    return dot(x, x).sqrt()


def unit(x: Vector) -> Vector:
    """Return x at length 1. The zero vector stays zero."""
    if x.any():
        return x / norm(x)
    return x


def cosine(x: Vector, y: Vector) -> Number:
    """Return the cosine of two vectors (), 0 if either is zero.

    Args:
        x: (d,).
        y: (d,).
    """
    return dot(unit(x), unit(y))


def total(values: Iterable[Number]) -> Number:
    """Return the float64 sum (), 0 of nothing.

    Args:
        values: numbers, () each, or a vector of them.
    """
    if isinstance(values, Tensor):
        return values.sum()
    found = list(values)
    if not found:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(found).sum()


def mean(values: Sequence[Number] | Vector) -> Number:
    """Return the float64 mean (), 0 of nothing.

    Args:
        values: numbers, () each, or a vector of them.
    """
    return total(values) / max(1, len(values))


def dots(x: Vector, rows: Sequence[Vector]) -> Vector:
    """Return the products of a vector with others, (n,)."""
    if not rows:
        return x.new_zeros(0)
    return torch.stack(list(rows)) @ x


def similarity_of(case: Case, similarity: str) -> Callable[[int, Any], Tensor]:
    """Return s_ij for cosine, dot or bilinear (a_i^T W c_j with the rows of W in parameters["W"]).

    The candidate j is an index, or a list of them for the vector of their similarities.
    """
    if similarity == "cosine":
        case = case.on_sphere()
    anchors, candidates = torch.stack(case.anchors), torch.stack(case.candidates)
    if similarity == "bilinear":
        anchors = anchors @ torch.stack(case.parameters["W"])
    table = (anchors @ candidates.T).unbind()
    return lambda i, j: table[i][j]


def squared_distance(x: Vector, y: Vector) -> Number:
    """Return the squared distance of two vectors of length 1."""
    return 2 - 2 * dot(x, y)


def squared_distances(x: Vector, rows: Sequence[Vector]) -> Vector:
    """Return the squared distances of a vector of length 1 from others, (n,)."""
    return 2 - 2 * dots(x, rows)


Temperature = float | str  # a number, or "learned": then parameters["logit_scale"] is log(1/tau) (Radford et al. 2021)


def tau_of(case: Case, temperature: Temperature) -> float | Number:
    if isinstance(temperature, str):
        return 1 / case.parameters["logit_scale"][0].exp()
    return temperature


def log_softmax(scores: Sequence[Number] | Vector, temperature: float | Number) -> Vector:
    raw = (torch.stack(list(scores)) / temperature).exp()
    return (raw / raw.sum()).log()
