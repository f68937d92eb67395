"""Diagnostics of embeddings for all domains: pure functions without gradient, computed in tiles."""

import math
from numbers import Real
from typing import Annotated

import torch
from torch import Tensor

from dipole.core.evaluation import arrays
from dipole.core.evaluation.arrays import Array, diagnostic, in_range
from dipole.core.evaluation.histograms import (
    Histogram,
    PairHistogram,
    distance_histogram,
    pair_distances,
    pair_histogram,
    unit_sides,
)
from dipole.core.objectives import spectrum
from dipole.core.objectives.engine import statistics_of
from dipole.core.objectives.losses.align_uniform import align, log_mean_kernel
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.regularizers.dp import Distance, check_margin
from dipole.core.objectives.similarity import Factors, full_precision, listed_similarities, normalize
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, Count, LogSumExp, SoftmaxMean
from dipole.core.objectives.tiles import TILE
from dipole.core.utils.errors import PairsError

__all__ = [
    "Histogram", "PairHistogram", "alignment", "conditional_entropy", "distance_histogram", "effective_rank",
    "margin_occupancy", "mean_distance", "mean_distance_ceiling", "min_max_ratio", "mutual_information",
    "numerical_rank", "pair_histogram", "similarity_error", "uniformity",
]  # fmt: skip

Sharpness = Annotated[float, Range(at_least=0), "sharpness t_neg of the negatives' weights"]


@torch.no_grad()
def _statistics(pairs: Pairs, *wanted: AnyStatistic) -> tuple[Tensor, ...]:
    found = statistics_of(Factors(*unit_sides(pairs), 1.0), pairs, wanted)
    return tuple(found[statistic] for statistic in wanted)


@diagnostic(formula="share of pairs with delta_pos < D_ij < delta_neg", source="LMCL Eq. 6")
def margin_occupancy(pairs: Pairs | Array, delta_pos: Distance = 0.1, delta_neg: Distance = 0.5) -> float:
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

    Example:
        >>> dipole.evaluation.margin_occupancy([[1, 0], [0, 1], [-1, 0], [0, -1]], delta_neg=0.6) == 4 / 6
        True
    """
    check_margin("margin_occupancy", delta_pos, delta_neg)
    pairs = arrays.every_pair(pairs)
    (inside,) = _statistics(pairs, Count(1 - 2 * delta_neg, 1 - 2 * delta_pos))
    total, pairs_seen = inside.sum(), pairs.negative_counts.sum()
    if not pairs.views:
        distance = (1 - _positive_cosines(pairs)) / 2
        listed = pairs.positives >= 0
        total = total + ((distance > delta_pos) & (distance < delta_neg) & listed).sum()
        pairs_seen = pairs_seen + listed.sum()
    return float(total / pairs_seen.clamp_min(1))


@diagnostic(
    formula="E_{y_i != y_j} max(delta_neg - mu - D_ij, 0) + E_{y_k = y_l} max(D_kl - delta_pos - mu, 0)",
    source="LMCL Thm. 3",
)
def similarity_error(
    embeddings: Array,
    labels: Array,
    delta_pos: Distance = 0.1,
    delta_neg: Distance = 0.5,
    mu: Annotated[float | None, Range(above=0), "slack (none: half the margin)"] = None,
    weight: Annotated[float, Range(above=0), "lambda of the regularizer"] = 0.1,
) -> tuple[float, float]:
    """Return by how much distances contradict the classes, and the theorem's bound of it.

    Formula (LMCL Thm. 3), bound 4 (delta_neg - delta_pos) / lambda + (K_max / K_min) / C, where K_k is the number of
    points outside class k and C the number of classes.

    Args:
        embeddings: (n, d).
        labels: (n,) integer classes. Rows with a negative label are left out.
        delta_pos: lower end of the margin, in [0, 1].
        delta_neg: upper end of the margin, in [0, 1], above delta_pos.
        mu: slack in (0, delta_neg - delta_pos). The default is half the margin.
        weight: lambda, > 0.

    Returns:
        (error, bound).

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings or labels of another shape.
        OptionError: an option is out of its range, or the margin is empty.

    Example:
        >>> error, bound = dipole.evaluation.similarity_error([[1, 0], [2, 0], [0, 1]], labels=[0, 0, 1])
        >>> error, round(bound, 1)
        (0.0, 17.0)
    """
    check_margin("similarity_error", delta_pos, delta_neg)
    if mu is None:
        mu = (delta_neg - delta_pos) / 2
    embeddings = arrays.as_matrix("embeddings", embeddings, rows=2)
    classes = arrays.as_classes("labels", labels, len(embeddings)).to(embeddings.device)
    labelled = classes >= 0
    embeddings, classes = arrays.as_matrix("labelled embeddings", embeddings[labelled], rows=2), classes[labelled]
    sums, counts = embeddings.new_zeros(2, dtype=torch.double), embeddings.new_zeros(2, dtype=torch.double)
    for distance, i, j in pair_distances(embeddings):
        same = classes[i] == classes[j]
        excess = torch.where(same, distance - delta_pos - mu, delta_neg - mu - distance).clamp_min_(0).double()
        for kind, mask in enumerate((~same, same)):
            sums[kind] += excess[mask].sum()
            counts[kind] += mask.sum()
    bound = 4 * (delta_neg - delta_pos) / weight + class_ratio(classes)
    return float((sums / counts.clamp_min(1)).sum()), bound


def class_ratio(labels: Tensor) -> float:
    """Return (K_max/K_min)/C, K_k the number of points outside class k (LMCL Thm. 3), or inf with one class."""
    outside = len(labels) - labels.unique(return_counts=True)[1]
    return float(outside.max() / outside.min()) / len(outside) if len(outside) > 1 else math.inf


@diagnostic(
    formula="H(X-|X) = mean_i -sum_j pi-_ij log pi-_ij, pi-_ij ~ e^{-t_neg d2_ij}; maximum log |N(i)|",
    source="CACR Eq. 8, Fig. 3-5",
)
def conditional_entropy(pairs: Pairs | Array, t_neg: Sharpness = 2.0) -> tuple[float, float]:
    """Return the entropy of the weights of the negatives given the anchor, and its maximum.

    Formula (CACR Eq. 8): mean_i -sum_j pi_ij log pi_ij, pi_ij ~ e^{-t_neg d2_ij}, d2 of unit vectors.

    Args:
        pairs: anchors and their negatives, or embeddings (n >= 2, d) of different instances.
        t_neg: sharpness of the weights, >= 0.

    Returns:
        (entropy, mean of log |N(i)|), both in nats, over anchors that have negatives, or (0, 0) without any.

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings of another shape.
        OptionError: `t_neg` is out of its range.

    Example:
        >>> entropy, maximum = dipole.evaluation.conditional_entropy([[1, 0], [0, 1], [-1, 0], [0, -1]])
        >>> round(entropy, 3), round(maximum, 3)
        (0.739, 1.099)
    """
    return entropy_of_weights(arrays.every_pair(pairs), t_neg)


def entropy_of_weights(pairs: Pairs, sharpness: float) -> tuple[float, float]:
    """Return what `conditional_entropy` returns. A sharpness below 0 reverses the weights, e^{+|t_neg| d2_ij}."""
    scale, some = 2 * sharpness, pairs.negative_counts > 0
    if not bool(some.any()):
        return 0.0, 0.0
    # pi ~ e^{scale s}, so -sum pi log pi = log sum e^{scale s} - scale sum pi s.
    log_sum, mean = _statistics(pairs, LogSumExp(scale), SoftmaxMean(scale))
    entropy = (log_sum - scale * mean)[some].mean()
    return float(entropy), float(pairs.negative_counts[some].cpu().double().log().mean())


@diagnostic(formula="I(X;X-) = mean_i sum_j pi-_ij log( pi-_ij |N(i)| )", source="CACR Eq. 7")
def mutual_information(pairs: Pairs | Array, t_neg: Sharpness = 2.0) -> float:
    """Return the mutual information of anchor and drawn negative in nats.

    It is the maximum of the conditional entropy minus the conditional entropy.

    Formula (CACR Eq. 7): mean_i sum_j pi_ij log( pi_ij |N(i)| ), as in `conditional_entropy`.

    Args:
        pairs: as in `conditional_entropy`, with embeddings (n >= 2, d).
        t_neg: as in `conditional_entropy`.

    Raises:
        PairsError: as there.
        OptionError: as there.

    Example:
        >>> round(dipole.evaluation.mutual_information([[1, 0], [0, 1], [-1, 0], [0, -1]]), 3)
        0.36
    """
    entropy, maximum = conditional_entropy(pairs, t_neg)
    return maximum - entropy


@diagnostic(
    formula="mean_x (D_max - D_min) / D_min, D(x, x_i) = ||L Phi(x) - L Phi(x_i)||^2 / rank(L)", source="CLLR Thm. 1, 3"
)
def min_max_ratio(features: Array) -> float:
    """Return the contrast of distances: farthest against nearest other point, averaged over points.

    Formula (CLLR Thms. 1, 3): mean_x (D_max - D_min) / D_min, D the squared distance, whose divisor (H or rank L)
    cancels.

    Args:
        features: (n >= 2, H), not normalised. For CLLR pass L Phi(x).

    Returns:
        The mean over points that no other point coincides with. nan if there are none.

    Raises:
        DataError: a vector is not finite.
        PairsError: features of another shape.

    Example:
        >>> round(dipole.evaluation.min_max_ratio([[0], [1], [3]]), 3)
        4.083
    """
    return float(min_max_ratios(features).mean())


def min_max_ratios(features: Array) -> Tensor:
    """Return (D_max - D_min) / D_min of each point that no other point coincides with (`min_max_ratio`)."""
    x = full_precision(arrays.finite_rows(arrays.as_matrix("features", features, rows=2), "features"))
    x = arrays.moderate(x, arrays.size(x))
    ratios = []
    for top in range(0, len(x), TILE):
        distance = torch.cdist(x[top : top + TILE], x, compute_mode="donot_use_mm_for_euclid_dist").square()
        own = torch.arange(len(distance), device=x.device)
        nearest = distance.index_put((own, own + top), distance.new_tensor(math.inf)).amin(1)
        apart = nearest > 0
        ratios.append((distance.amax(1)[apart] - nearest[apart]) / nearest[apart])
    return torch.cat(ratios)


def _positive_cosines(pairs: Pairs) -> Tensor:
    x, y = unit_sides(pairs)
    return listed_similarities(x, y, pairs.positives)


@diagnostic(formula="mean_{i, p in P(i)} ||a_i - c_p||^alpha", source="Wang & Isola 2020, Sec. 4.1")
def alignment(
    pairs: Pairs | Array, positives: Array | None = None, alpha: Annotated[float, Range(above=0), "exponent"] = 2.0
) -> float:
    """Return the mean distance of positives on the unit sphere, from 0 to 2^alpha. nan without positives.

    Formula (Wang & Isola 2020, Sec. 4.1): mean_{i, p in P(i)} ||a_i - c_p||^alpha.

    Args:
        pairs: anchors and their positives, or an array of anchors (n, d).
        positives: (n, d), row i the positive of anchor i. Only with an array.
        alpha: exponent, > 0.

    Raises:
        DataError: a vector is not finite.
        PairsError: arrays of another shape, or one array alone.
        OptionError: `alpha` is out of its range.

    Example:
        >>> dipole.evaluation.alignment([[1, 0], [0, 2]], [[3, 0], [0, -1]])
        2.0
    """
    if isinstance(positives, Real):  # as `pair_histogram`, after Pairs
        return alignment(pairs, alpha=float(positives))
    pairs = arrays.matched("alignment", pairs, positives)
    return float(align(_positive_cosines(pairs), alpha)[pairs.positives >= 0].mean())


@diagnostic(
    formula="log mean_{i,j} e^{-t ||z_i - z_j||^2} over pairs of different instances that one encoder made",
    source="Wang & Isola 2020, Sec. 4.1",
)
def uniformity(pairs: Pairs | Array, t: Annotated[float, Range(above=0), "precision"] = 2.0) -> float:
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

    Example:
        >>> round(dipole.evaluation.uniformity([[1, 0], [-1, 0]]), 3)
        -8.0
    """
    found = []
    for side in arrays.every_pair(pairs).within_sides():
        if not bool((side.negative_counts > 0).any()):
            return math.nan
        (potential,) = _statistics(side, LogSumExp(2 * t))
        positive = _positive_cosines(side) if side.positives.shape[1] else side.anchors[:, :0]
        mask = side.positives >= 0
        found.append(float(log_mean_kernel(potential, side.negative_counts, positive, mask, side.views, t)))
    return float(torch.tensor(found).mean())


@diagnostic(formula="mean of D_ij over pairs <= N / (2N - 2)", source="LMCL Eq. 5")
def mean_distance(embeddings: Array) -> float:
    """Return the mean normalised distance of all pairs, from 0 to `mean_distance_ceiling`.

    Args:
        embeddings: (n >= 2, d).

    Raises:
        DataError: a vector is not finite.
        PairsError: embeddings of another shape.

    Example:
        >>> round(dipole.evaluation.mean_distance([[1, 0], [0, 1], [-1, 0]]), 3)
        0.667
    """
    x = arrays.finite_rows(arrays.as_matrix("embeddings", embeddings, rows=2), "embeddings").double()
    z = normalize(arrays.moderate_rows(x))
    n = len(z)
    cosine = (z.sum(0).square().sum() - z.square().sum()) / (n * (n - 1))
    return float((1 - cosine) / 2)


@in_range
def mean_distance_ceiling(n: Annotated[int, Range(at_least=2), "points"]) -> float:
    """Return the largest mean distance of points on a sphere, N / (2N - 2) (LMCL Eq. 5).

    Args:
        n: number of points, >= 2.

    Raises:
        OptionError: `n` is below 2.

    Example:
        >>> dipole.evaluation.mean_distance_ceiling(5)
        0.625
    """
    return n / (2 * n - 2)


@diagnostic(
    formula="exp( -sum_i p_i log p_i ), p_i = sigma_i / sum_j sigma_j of the singular values",
    source="Roy & Vetterli 2007, Sec. 2",
)
def effective_rank(
    matrix: Array, tolerance: Annotated[float, Range(at_least=0), "singular values not above it count as zero"] = 0.0
) -> float:
    """Return the number of directions in use, from 1 to min(shape). 0 if all singular values count as zero.

    Formula (Roy & Vetterli 2007, Sec. 2): exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j.

    Args:
        matrix: (m, n), such as one embedding per row.
        tolerance: absolute threshold, >= 0.

    Raises:
        DataError: a value is not finite.
        PairsError: a matrix of another shape.
        OptionError: `tolerance` is out of its range.

    Example:
        >>> round(dipole.evaluation.effective_rank([[1, 0], [0, 1], [0, 0]]), 3)
        2.0
    """
    x = _matrix(matrix)
    scaled = arrays.moderate(x, arrays.size(x))
    if scaled is not x:
        tolerance /= float(arrays.size(x))
    return spectrum.effective_rank(scaled, tolerance)


@in_range
def numerical_rank(
    matrix: Array, tolerance: Annotated[float | None, Range(at_least=0), "share of the largest"] = None
) -> int:
    """Return the number of singular values above a share of the largest.

    Args:
        matrix: (m, n), such as one embedding per row.
        tolerance: that share, >= 0. Default: max(m, n) times the machine epsilon.

    Raises:
        DataError: a value is not finite.
        PairsError: a matrix of another shape.
        OptionError: `tolerance` is out of its range.

    Example:
        >>> dipole.evaluation.numerical_rank([[1, 2], [2, 4]])
        1
    """
    x = _matrix(matrix)
    values = spectrum.converged(torch.linalg.svdvals, arrays.moderate(x, arrays.size(x))).to(x.real.dtype)
    if tolerance is None:
        tolerance = max(x.shape) * torch.finfo(values.dtype).eps
    return int((values > tolerance * max(values.tolist(), default=0.0)).sum())


def _matrix(matrix: Array) -> Tensor:
    x = arrays.as_tensor("matrix", matrix, "(m, n)")
    if x.ndim != 2:
        raise PairsError(f"matrix must be of shape (m, n), got {tuple(x.shape)}.")
    if not (x.is_floating_point() or x.is_complex()):
        x = x.double()
    if x.dtype == torch.complex32:
        x = x.to(torch.complex64)
    return full_precision(arrays.finite_rows(x, "the matrix"))
