"""Distances of pairs, and their histograms."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from numbers import Real
from typing import Annotated

import torch
from torch import Tensor

from dipole.core.evaluation.arrays import Array, as_classes, as_matrix, diagnostic, finite_rows, matched, moderate_rows
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import full_precision, listed_similarities, normalize
from dipole.core.objectives.spec import Range
from dipole.core.objectives.tiles import TILE


@dataclass(frozen=True)
class Histogram:
    """Counts of normalised distances D_ij over pairs i < j.

    Args:
        edges: (bins + 1,) of the bins, from 0 to 1.
        all: (bins,) of all pairs.
        same: (bins,) of labelled pairs of one class. None without labels.
        different: (bins,) of labelled pairs of two classes. None without labels.
    """

    edges: Tensor
    all: Tensor
    same: Tensor | None
    different: Tensor | None


@dataclass(frozen=True)
class PairHistogram:
    """Counts of normalised distances of anchors to their positives and to their negatives.

    Args:
        edges: (bins + 1,) of the bins, from 0 to 1.
        correct: (bins,) of positives.
        incorrect: (bins,) of negatives.
    """

    edges: Tensor  # (bins + 1,)
    correct: Tensor
    incorrect: Tensor

    @property
    def error(self) -> float:
        """Return the smallest mean error of a threshold at an edge of the bins. nan without positives or negatives."""
        near, far = (torch.cat([x.new_zeros(1), x.cumsum(0)]) / x.sum() for x in (self.correct, self.incorrect))
        return float(((1 - near + far) / 2).min())


def _unit(embeddings: Tensor) -> Tensor:
    x = full_precision(finite_rows(embeddings.detach(), "embeddings"))
    return normalize(moderate_rows(x))


def unit_sides(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return anchors and candidates of unit length, one tensor if they are one."""
    x = _unit(pairs.anchors)
    if pairs.anchors is pairs.candidates:
        return x, x
    return x, _unit(pairs.candidates)


def pair_distances(embeddings: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield D_ij of pairs i < j with their rows and columns, flat, tile by tile."""
    z = _unit(embeddings)
    number = torch.arange(len(z), device=z.device)
    for top, left in combinations_with_replacement(range(0, len(z), TILE), 2):
        rows, columns = slice(top, top + TILE), slice(left, left + TILE)
        distance = ((1 - z[rows] @ z[columns].T) / 2).clamp_(0, 1)
        i, j = number[rows].unsqueeze(1).expand_as(distance), number[columns].expand_as(distance)
        if top == left:
            keep = i < j
            yield distance[keep], i[keep], j[keep]
        else:
            yield distance.flatten(), i.flatten(), j.flatten()


@diagnostic(
    formula="histogram of D_ij = (1 - cos_ij) / 2 over pairs i < j, by same and different class",
    source="LMCL Fig. 2, 5; CLLR Fig. 2, 3",
)
def distance_histogram(
    embeddings: Array, labels: Array | None = None, bins: Annotated[int, Range(at_least=1), "bins"] = 50
) -> Histogram:
    """Return the histogram of the normalised distances of all pairs, split by class if there are labels.

    Formula (LMCL Eq. 3): D_ij = (1 - cos_ij) / 2 of pairs i < j.

    Args:
        embeddings: (n >= 2, d).
        labels: (n,) integer classes, negative for unlabelled rows, or None.
        bins: equal bins of [0, 1], >= 1.

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings or labels of another shape.
        OptionError: `bins` is out of its range.

    Source: LMCL Figs. 2 and 5; CLLR Figs. 2 and 3.

    Example:
        >>> found = dipole.evaluation.distance_histogram([[1, 0], [2, 0], [-1, 0]], labels=[0, 0, 1], bins=4)
        >>> found.all.tolist(), found.same.tolist()
        ([1, 0, 0, 2], [1, 0, 0, 0])
    """
    embeddings = as_matrix("embeddings", embeddings, rows=2)
    classes = None
    if labels is not None:
        classes = as_classes("labels", labels, len(embeddings)).to(embeddings.device)
    counts = torch.zeros(3, bins, dtype=torch.long, device=embeddings.device)
    for distance, i, j in pair_distances(embeddings):
        place = (distance * bins).long().clamp_max_(bins - 1)
        if classes is not None:
            first, second = classes[i], classes[j]
            place += bins * (1 + (first == second).long()) * ((first >= 0) & (second >= 0))
        counts += torch.bincount(place, minlength=3 * bins).view(3, bins)
    same, different = (None, None) if labels is None else (counts[2], counts[1])
    return Histogram(torch.linspace(0, 1, bins + 1), counts.sum(0), same, different)


@diagnostic(
    formula="histogram of D_ip = (1 - cos_ip) / 2 over positives p (correct) and over negatives (incorrect)",
    source="LMCL Fig. 5; CLLR Fig. 3",
)
@torch.no_grad()
def pair_histogram(
    pairs: Pairs | Array, positives: Array | None = None, bins: Annotated[int, Range(at_least=1), "bins"] = 50
) -> PairHistogram:
    """Return the histograms of the normalised distances of anchors to positives and to negatives.

    Args:
        pairs: anchors with positives and negatives, or an array of anchors (n, d).
        positives: (n, d), row i the positive of anchor i and a negative of the others. Only with an array.
        bins: equal bins of [0, 1], >= 1.

    Raises:
        DataError: a vector is not finite.
        PairsError: arrays of another shape, or one array alone.
        OptionError: `bins` is out of its range.

    Source: LMCL Fig. 5 and CLLR Fig. 3. The papers call the two histograms correct and incorrect and do not define
    them. This is our interpretation.

    Example:
        >>> found = dipole.evaluation.pair_histogram([[1, 0], [0, 1]], [[2, 0], [0, 3]], bins=2)
        >>> found.correct.tolist(), found.incorrect.tolist(), found.error
        ([2, 0], [0, 2], 0.0)
    """
    if isinstance(positives, Real):  # the second argument after Pairs has always been `bins`
        return pair_histogram(pairs, bins=int(positives))
    pairs = matched("pair_histogram", pairs, positives)

    def counts(distance: Tensor) -> Tensor:
        place = (distance.clamp(0, 1) * bins).long().clamp_max_(bins - 1)
        return torch.bincount(place, minlength=bins).cpu()

    x, y = unit_sides(pairs)
    correct = (1 - listed_similarities(x, y, pairs.positives)) / 2
    incorrect = torch.zeros(bins, dtype=torch.long)
    negative = pairs.negative_mask()
    for top in range(0, len(x), TILE):
        rows = slice(top, top + TILE)
        incorrect += counts(((1 - x[rows] @ y.T) / 2)[negative[rows]])
    return PairHistogram(torch.linspace(0, 1, bins + 1), counts(correct[pairs.positives >= 0]), incorrect)
