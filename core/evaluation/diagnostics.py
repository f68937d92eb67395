"""Diagnostics of embeddings for all domains: pure functions without gradient, computed in tiles."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dipole.core.objectives.checks import check_tensor
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.losses.align_uniform import align, log_mean_kernel
from dipole.core.objectives.options import Range, in_range
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.regularizers.dp import Distance, check_margin
from dipole.core.objectives.similarity import full_precision, normalize, paired
from dipole.core.objectives.spectrum import effective_rank, numerical_rank
from dipole.core.objectives.statistics import AnyStatistic, Count, LogSumExp, SoftmaxMean
from dipole.core.objectives.tiles import TILE
from dipole.core.utils.errors import PairsError
from dipole.core.utils.finite import finite_rows

__all__ = [
    "Histogram", "PairHistogram", "alignment", "conditional_entropy", "distance_histogram", "effective_rank",
    "margin_occupancy", "mean_distance", "mean_distance_ceiling", "min_max_ratio", "mutual_information",
    "numerical_rank", "pair_histogram", "similarity_error", "uniformity",
]  # fmt: skip

Sharpness = Annotated[float, Range(at_least=0), "sharpness t_neg of the negatives' weights"]


@dataclass(frozen=True)
class Histogram:
    """Counts of normalised distances D_ij over pairs i < j.

    Args:
        edges: (bins + 1,) of the bins, from 0 to 1.
        all: (bins,) of all pairs.
        same: (bins,) of pairs of one class. None without labels.
        different: (bins,) of pairs of two classes. None without labels.
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


def every_pair(embeddings: Tensor | Pairs) -> Pairs:
    """Return pairs in which every other point is a negative. Pairs are returned as they are."""
    if isinstance(embeddings, Pairs):
        return embeddings
    check_tensor("embeddings", embeddings, "(n >= 2, d)")
    if embeddings.ndim != 2 or len(embeddings) < 2:
        raise PairsError(f"embeddings must be (n >= 2, d), got {tuple(embeddings.shape)}.")
    return Pairs.of_points(embeddings.detach())


def _require_pairs(pairs: Pairs) -> None:
    if not isinstance(pairs, Pairs):
        raise PairsError(f"this needs Pairs with positives, such as Pairs.both(a, b), got {type(pairs).__name__}.")


def _unit(embeddings: Tensor) -> Tensor:
    return normalize(full_precision(finite_rows(embeddings.detach(), "embeddings")))


def _sides(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return anchors and candidates of unit length, one tensor if they are one."""
    _require_pairs(pairs)
    x = _unit(pairs.anchors)
    if pairs.anchors is pairs.candidates:
        return x, x
    return x, _unit(pairs.candidates)


def _statistics(pairs: Pairs, *wanted: AnyStatistic) -> tuple[Tensor, ...]:
    x, y = _sides(pairs)
    with torch.no_grad():
        found = row_statistics(
            x,
            y,
            pairs.excluded,
            wanted,
            counts=pairs.negative_counts,
            bound=1.0,
            symmetric=pairs.mutual and x is y,
            first=pairs.first_negative,
        )
    return tuple(found[statistic] for statistic in wanted)


def _upper_tiles(n: int) -> Iterator[tuple[slice, slice]]:
    for top in range(0, n, TILE):
        for left in range(top, n, TILE):
            yield slice(top, min(top + TILE, n)), slice(left, min(left + TILE, n))


def pair_distances(embeddings: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield D_ij of pairs i < j with their rows and columns, flat, tile by tile."""
    z = _unit(embeddings)
    for rows, columns in _upper_tiles(len(z)):
        distance = ((1 - z[rows] @ z[columns].T) / 2).clamp_(0, 1)
        i = torch.arange(rows.start, rows.stop, device=z.device).unsqueeze(1).expand_as(distance)
        j = torch.arange(columns.start, columns.stop, device=z.device).expand_as(distance)
        if rows == columns:
            keep = i < j
            yield distance[keep], i[keep], j[keep]
        else:
            yield distance.flatten(), i.flatten(), j.flatten()


@register(
    "distance_histogram",
    kind="diagnostic",
    formula="histogram of D_ij = (1 - cos_ij) / 2 over pairs i < j, by same and different class",
    source="LMCL Fig. 2, 5; CLLR Fig. 2, 3",
)
@in_range
def distance_histogram(
    embeddings: Tensor, labels: Tensor | None = None, bins: Annotated[int, Range(at_least=1), "bins"] = 50
) -> Histogram:
    """Return the histogram of the normalised distances of all pairs, split by class if there are labels.

    Formula (LMCL Eq. 3): D_ij = (1 - cos_ij) / 2 of pairs i < j.

    Args:
        embeddings: (n >= 2, d) of a floating dtype.
        labels: (n,) classes, or None.
        bins: equal bins of [0, 1], >= 1.

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings of another shape.
        OptionError: `bins` is out of its range.

    Source: LMCL Figs. 2 and 5; CLLR Figs. 2 and 3.
    """
    every_pair(embeddings)
    counts = torch.zeros(2, bins, dtype=torch.long, device=embeddings.device)
    for distance, i, j in pair_distances(embeddings):
        place = (distance * bins).long().clamp_max_(bins - 1)
        if labels is not None:
            place += bins * (labels[i] == labels[j]).long().to(place.device)
        counts += torch.bincount(place, minlength=2 * bins).view(2, bins)
    edges = torch.linspace(0, 1, bins + 1)
    if labels is None:
        return Histogram(edges, counts[0], None, None)
    return Histogram(edges, counts.sum(0), counts[1], counts[0])


@register(
    "pair_histogram",
    kind="diagnostic",
    formula="histogram of D_ip = (1 - cos_ip) / 2 over positives p (correct) and over negatives (incorrect)",
    source="LMCL Fig. 5; CLLR Fig. 3",
)
@in_range
@torch.no_grad()
def pair_histogram(pairs: Pairs, bins: Annotated[int, Range(at_least=1), "bins"] = 50) -> PairHistogram:
    """Return the histograms of the normalised distances of anchors to positives and to negatives.

    Args:
        pairs: anchors with positives and negatives.
        bins: equal bins of [0, 1], >= 1.

    Raises:
        DataError: a vector is not finite.
        OptionError: `bins` is out of its range.

    Source: LMCL Fig. 5 and CLLR Fig. 3. The papers call the two histograms correct and incorrect and do not define
    them. This is our interpretation.
    """

    _require_pairs(pairs)

    def counts(distance: Tensor) -> Tensor:
        place = (distance.clamp(0, 1) * bins).long().clamp_max_(bins - 1)
        return torch.bincount(place, minlength=bins).cpu()

    x, y = _sides(pairs)
    correct = (1 - paired(x, y, pairs.positives)) / 2
    incorrect = torch.zeros(bins, dtype=torch.long)
    negative = pairs.negative_mask()
    for top in range(0, len(x), TILE):
        rows = slice(top, top + TILE)
        incorrect += counts(((1 - x[rows] @ y.T) / 2)[negative[rows]])
    return PairHistogram(torch.linspace(0, 1, bins + 1), counts(correct[pairs.positives >= 0]), incorrect)


@register(
    "margin_occupancy",
    kind="diagnostic",
    formula="share of pairs with delta_pos < D_ij < delta_neg",
    source="LMCL Eq. 6",
)
@in_range
def margin_occupancy(pairs: Pairs | Tensor, delta_pos: Distance = 0.1, delta_neg: Distance = 0.5) -> float:
    """Return the share of pairs of different instances whose distance is inside the margin.

    Formula (LMCL Eq. 6): R0 over the number of pairs.

    Args:
        pairs: anchors and their negatives, or embeddings (n >= 2, d) for all pairs.
        delta_pos: lower end of the margin, in [0, 1].
        delta_neg: upper end of the margin, in [0, 1], above delta_pos.

    Returns:
        The share in [0, 1], 0 without pairs.

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings of another shape.
        OptionError: the margin is empty.
    """
    check_margin("margin_occupancy", delta_pos, delta_neg)
    pairs = every_pair(pairs)
    (inside,) = _statistics(pairs, Count(1 - 2 * delta_neg, 1 - 2 * delta_pos))
    total, pairs_seen = inside.sum(), pairs.negative_counts.sum()
    if not pairs.views:
        distance = (1 - _positive_cosines(pairs)) / 2
        listed = pairs.positives >= 0
        total = total + ((distance > delta_pos) & (distance < delta_neg) & listed).sum()
        pairs_seen = pairs_seen + listed.sum()
    return float(total / pairs_seen.clamp_min(1))


@register(
    "similarity_error",
    kind="diagnostic",
    formula="E_{y_i != y_j} max(delta_neg - mu - D_ij, 0) + E_{y_k = y_l} max(D_kl - delta_pos - mu, 0)",
    source="LMCL Thm. 3",
)
@in_range
def similarity_error(
    embeddings: Tensor,
    labels: Tensor,
    delta_pos: Distance = 0.1,
    delta_neg: Distance = 0.5,
    mu: Annotated[float | None, Range(above=0), "slack; half the margin when none"] = None,
    weight: Annotated[float, Range(above=0), "lambda of the regularizer"] = 0.1,
) -> tuple[float, float]:
    """Return by how much distances contradict the classes, and the theorem's bound of it.

    Formula (LMCL Thm. 3), bound 4 (delta_neg - delta_pos) / lambda + (K_max / K_min) / C, where K_k is the number of
    points outside class k and C the number of classes.

    Args:
        embeddings: (n, d).
        labels: (n,) classes.
        delta_pos: lower end of the margin, in [0, 1].
        delta_neg: upper end of the margin, in [0, 1], above delta_pos.
        mu: slack in (0, delta_neg - delta_pos); half the margin when None.
        weight: lambda, > 0.

    Returns:
        (error, bound).

    Raises:
        DataError: a vector is not finite.
        OptionError: an option is out of its range, or the margin is empty.
    """
    check_margin("similarity_error", delta_pos, delta_neg)
    if mu is None:
        mu = (delta_neg - delta_pos) / 2
    sums, counts = embeddings.new_zeros(2, dtype=torch.double), embeddings.new_zeros(2, dtype=torch.double)
    for distance, i, j in pair_distances(embeddings):
        same = (labels[i] == labels[j]).to(distance.device)
        excess = torch.where(same, distance - delta_pos - mu, delta_neg - mu - distance).clamp_min_(0).double()
        for kind, mask in enumerate((~same, same)):
            sums[kind] += excess[mask].sum()
            counts[kind] += mask.sum()
    outside = len(labels) - labels.unique(return_counts=True)[1]
    ratio = math.inf  # of one class
    if len(outside) > 1:
        ratio = float(outside.max() / outside.min())
    bound = 4 * (delta_neg - delta_pos) / weight + ratio / len(outside)
    return float((sums / counts.clamp_min(1)).sum()), bound


@register(
    "conditional_entropy",
    kind="diagnostic",
    formula="H(X-|X) = mean_i -sum_j pi-_ij log pi-_ij, pi-_ij ~ e^{-t_neg d2_ij}; maximum log |N(i)|",
    source="CACR Eq. 8, Fig. 3-5",
)
@in_range
def conditional_entropy(pairs: Pairs | Tensor, t_neg: Sharpness = 2.0) -> tuple[float, float]:
    """Return the entropy of the weights of the negatives given the anchor, and its maximum.

    Formula (CACR Eq. 8): mean_i -sum_j pi_ij log pi_ij, pi_ij ~ e^{-t_neg d2_ij}, d2 of unit vectors.

    Args:
        pairs: anchors and their negatives, or embeddings (n >= 2, d) of different instances.
        t_neg: sharpness of the weights, >= 0.

    Returns:
        (entropy, mean of log |N(i)|), both in nats, over anchors that have negatives; (0, 0) without any.

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings of another shape.
        OptionError: `t_neg` is out of its range.
    """
    pairs = every_pair(pairs)
    scale, some = 2 * t_neg, pairs.negative_counts > 0
    if not bool(some.any()):
        return 0.0, 0.0
    # pi ~ e^{scale s}, so -sum pi log pi = log sum e^{scale s} - scale sum pi s.
    log_sum, mean = _statistics(pairs, LogSumExp(scale), SoftmaxMean(scale))
    entropy = (log_sum - scale * mean)[some].mean()
    return float(entropy), float(pairs.negative_counts[some].double().log().mean())


@register(
    "mutual_information",
    kind="diagnostic",
    formula="I(X;X-) = mean_i sum_j pi-_ij log( pi-_ij |N(i)| )",
    source="CACR Eq. 7",
)
@in_range
def mutual_information(pairs: Pairs | Tensor, t_neg: Sharpness = 2.0) -> float:
    """Return the mutual information of anchor and drawn negative in nats.

    It is the maximum of the conditional entropy minus the conditional entropy.

    Formula (CACR Eq. 7): mean_i sum_j pi_ij log( pi_ij |N(i)| ), as in `conditional_entropy`.

    Args:
        pairs: as in `conditional_entropy`; embeddings are (n >= 2, d).
        t_neg: as in `conditional_entropy`.

    Raises:
        PairsError: as there.
        OptionError: as there.
    """
    entropy, maximum = conditional_entropy(pairs, t_neg)
    return maximum - entropy


@register(
    "min_max_ratio",
    kind="diagnostic",
    formula="mean_x (D_max - D_min) / D_min, D(x, x_i) = ||L Phi(x) - L Phi(x_i)||^2 / rank(L)",
    source="CLLR Thm. 1, 3",
)
def min_max_ratio(features: Tensor) -> float:
    """Return the contrast of distances: farthest against nearest other point, averaged over points.

    Formula (CLLR Thms. 1, 3): mean_x (D_max - D_min) / D_min, D the squared distance, whose divisor (H or rank L)
    cancels.

    Args:
        features: (n >= 2, H), not normalised; pass L Phi(x) for CLLR.

    Returns:
        The mean over points that no other point coincides with. nan if there are none.

    Raises:
        DataError: a vector is not finite.
        PairsError: features of another shape.
    """
    return float(min_max_ratios(features).mean())


def min_max_ratios(features: Tensor) -> Tensor:
    """Return (D_max - D_min) / D_min of each point that no other point coincides with; see `min_max_ratio`."""
    x = full_precision(finite_rows(every_pair(features).anchors, "features"))
    ratios = []
    for top in range(0, len(x), TILE):
        distance = torch.cdist(x[top : top + TILE], x, compute_mode="donot_use_mm_for_euclid_dist").square()
        own = torch.arange(len(distance), device=x.device)
        nearest = distance.index_put((own, own + top), distance.new_tensor(math.inf)).amin(1)
        apart = nearest > 0
        ratios.append((distance.amax(1)[apart] - nearest[apart]) / nearest[apart])
    return torch.cat(ratios)


def _positive_cosines(pairs: Pairs) -> Tensor:
    x, y = _sides(pairs)
    return paired(x, y, pairs.positives)


@register(
    "alignment",
    kind="diagnostic",
    formula="mean_{i, p in P(i)} ||a_i - c_p||^alpha",
    source="Wang & Isola 2020, Sec. 4.1",
)
@in_range
def alignment(pairs: Pairs, alpha: Annotated[float, Range(above=0), "exponent"] = 2.0) -> float:
    """Return the mean distance of positives on the unit sphere, from 0 to 2^alpha. nan without positives.

    Formula (Wang & Isola 2020, Sec. 4.1): mean_{i, p in P(i)} ||a_i - c_p||^alpha.

    Args:
        pairs: anchors and their positives.
        alpha: exponent, > 0.

    Raises:
        DataError: a vector is not finite.
        OptionError: `alpha` is out of its range.
    """
    return float(align(_positive_cosines(pairs), alpha)[pairs.positives >= 0].mean())


@register(
    "uniformity",
    kind="diagnostic",
    formula="log mean_{i,j} e^{-t ||z_i - z_j||^2} over pairs of different instances that one encoder made",
    source="Wang & Isola 2020, Sec. 4.1",
)
@in_range
def uniformity(pairs: Pairs | Tensor, t: Annotated[float, Range(above=0), "precision"] = 2.0) -> float:
    """Return the log of the mean Gaussian potential of different instances, averaged over both encoders.

    Formula (Wang & Isola 2020, Sec. 4.1): log mean_{i,j} e^{-t ||z_i - z_j||^2}, z of unit length.

    Args:
        pairs: of one batch, or embeddings (n >= 2, d) of different instances.
        t: precision of the potential, > 0.

    Returns:
        From -4 t (farthest apart) to 0 (one point). nan if there are no such pairs.

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings of another shape.
        OptionError: `t` is out of its range.
    """
    sides = every_pair(pairs).within_sides()
    return float(torch.tensor([_uniformity(side, t) for side in sides]).mean())


def _uniformity(pairs: Pairs, t: float) -> float:
    if not bool((pairs.negative_counts > 0).any()):
        return math.nan
    (potential,) = _statistics(pairs, LogSumExp(2 * t))
    positive = pairs.anchors[:, :0]
    if pairs.positives.shape[1]:
        positive = _positive_cosines(pairs)
    mask = pairs.positives >= 0
    return float(log_mean_kernel(potential, pairs.negative_counts, positive, mask, pairs.views, t))


@register(
    "mean_distance",
    kind="diagnostic",
    formula="mean of D_ij over pairs <= N / (2N - 2)",
    source="LMCL Eq. 5",
)
def mean_distance(embeddings: Tensor) -> float:
    """Return the mean normalised distance of all pairs, from 0 to `mean_distance_ceiling`.

    Args:
        embeddings: (n >= 2, d).

    Raises:
        PairsError: embeddings of another shape.
    """
    z = normalize(full_precision(every_pair(embeddings).anchors).double())
    n = len(z)
    cosine = (z.sum(0).square().sum() - z.square().sum()) / (n * (n - 1))
    return float((1 - cosine) / 2)


def mean_distance_ceiling(n: int) -> float:
    """Return the largest mean distance of points on a sphere, N / (2N - 2) (LMCL Eq. 5).

    Args:
        n: number of points, >= 2.
    """
    return n / (2 * n - 2)


register(
    "effective_rank",
    kind="diagnostic",
    formula="exp( -sum_i p_i log p_i ), p_i = sigma_i / sum_j sigma_j of the singular values",
    source="Roy & Vetterli 2007, Sec. 2",
)(effective_rank)
