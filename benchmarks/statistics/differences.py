"""Mean of one sample, tests of the difference between two, and the correction for many tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan, sqrt

import numpy as np
from scipy import special, stats

from dipole.benchmarks.statistics import estimates
from dipole.benchmarks.statistics.estimates import NEEDED, NOISE
from dipole.core.evaluation.intervals import Array, as_sample

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation and t-interval of one sample.

    Args:
        n: values.
        mean: of them.
        std: with n - 1, nan for one value.
        low: lower end of the interval, or nan without spread.
        high: upper end.
    """

    n: int
    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Result of a test of two objectives, on their common seeds or as independent samples.

    Args:
        n: pairs, or values of the smaller sample.
        difference: other - base.
        low: lower end of its interval, or nan if there is none.
        high: upper end.
        p_t: two-sided, of the t-test, or nan if there is no test.
        p_wilcoxon: two-sided, of the signed-rank test, or of the rank-sum test for independent samples.
        effect: Cohen's d_z, or nan for independent samples.
        method: "paired t", or "Welch" for independent samples.
        spread: standard deviation of the paired differences, or that of a seed whose means have Welch's error.
        larger: values of the larger of two samples, or None for pairs.
    """

    n: int
    difference: float
    low: float
    high: float
    p_t: float
    p_wilcoxon: float
    effect: float
    method: str = "paired t"
    spread: float = nan
    larger: int | None = None


def summarize(values: Sequence[float], confidence: float = CONFIDENCE) -> Summary:
    """Return the mean over seeds with standard deviation and t-interval: mean +- t_{n-1} s / sqrt(n).

    Equal values have no interval.

    Args:
        values: (n >= 1,).
        confidence: of the interval, in (0, 1).

    Raises:
        DataError: there are no values, or one is not finite.
    """
    sample = as_sample(values)
    n, mean = len(sample), float(sample.mean())
    if n == 1:
        return Summary(1, mean, nan, nan, nan)
    std = float(sample.std(ddof=1))
    if std <= NOISE * np.abs(sample).max():
        return Summary(n, mean, std, nan, nan)
    half = half_width(std / sqrt(n), n - 1, confidence)
    return Summary(n, mean, std, mean - half, mean + half)


def difference(
    base: Mapping[int, float],
    other: Mapping[int, float],
    confidence: float = CONFIDENCE,
    resolution: float | None = None,
) -> PairedTest:
    """Test one objective against another: on common seeds (paired), or on all seeds as independent samples (Welch).

    `estimates.pairs_are_better` decides by the numbers of seeds, and `method` names the test. If all pairs have the
    same nonzero difference, the pairs have no spread (`paired`). Then the samples are compared as independent ones.

    Args:
        base: values by seed.
        other: values by seed.
        confidence: as of `paired`.
        resolution: as of `paired`.

    Raises:
        DataError: a value is not finite.
    """
    if min(len(base), len(other)) < NEEDED:
        return paired(base, other, confidence, resolution)
    if estimates.pairs_are_better(len(base.keys() & other.keys()), len(other), len(base)):
        pairs = paired(base, other, confidence, resolution)
        if not isnan(pairs.p_t):
            return pairs
    x, y = as_sample(list(other.values())), as_sample(list(base.values()))
    absent_x, absent_y = np.full(len(x), nan), np.full(len(y), nan)
    found = estimates.differences(np.concatenate([x, absent_y]), np.concatenate([absent_x, y]))
    low, high = found.bounds(confidence)
    step = _step(np.concatenate([x, y]), resolution)
    p_ranks = float(stats.mannwhitneyu(np.rint(x / step), np.rint(y / step)).pvalue)
    p_t, n, larger = 1.0, min(len(x), len(y)), max(len(x), len(y))
    if found.value:
        p_t = float(found.p_values())
    spread = sqrt(found.variance / (1 / n + 1 / larger))
    return PairedTest(n, float(found.value), float(low), float(high), p_t, p_ranks, nan, "Welch", spread, larger)


def paired(
    base: Mapping[int, float],
    other: Mapping[int, float],
    confidence: float = CONFIDENCE,
    resolution: float | None = None,
) -> PairedTest:
    """Paired t-test and Wilcoxon signed-rank test of `other` against `base` on the seeds that both have.

    Fewer than two common seeds decide nothing: the p-values are nan. So it is with the t-test and the effect size where
    the difference is the same for every seed, which a coarse metric gives by chance: there is no spread to judge it by
    (scipy.stats.ttest_rel answers p = 0), and no interval. No difference at all has p = 1.

    Args:
        base: values by seed.
        other: values by seed.
        confidence: of the interval, in (0, 1).
        resolution: smallest step of the metric, such as 1 / n of n test points. Differences are rounded to it before
            they are ranked, so that equal ones are ties. Default: what floating point adds.

    Raises:
        DataError: a value is not finite.
    """
    seeds = sorted(base.keys() & other.keys())
    if not seeds:
        return PairedTest(0, nan, nan, nan, nan, nan, nan)
    x, y = (as_sample([side[seed] for seed in seeds]) for side in (other, base))
    gain, n = x - y, len(seeds)
    if n < NEEDED:
        return PairedTest(n, float(gain.mean()), nan, nan, nan, nan, nan)
    steps = np.rint(gain / _step(np.concatenate([x, y]), resolution))
    if not steps.any():
        return PairedTest(n, 0.0, nan, nan, 1.0, 1.0, 0.0)
    if (steps == steps[0]).all():
        return PairedTest(n, float(gain.mean()), nan, nan, nan, wilcoxon(steps), nan)
    found = estimates.differences(x, y)
    low, high = found.bounds(confidence)
    spread = float(np.sqrt(n * found.variance))
    tests = float(found.p_values()), wilcoxon(steps)
    effect = float(found.value) / spread
    return PairedTest(n, float(found.value), float(low), float(high), *tests, effect, spread=spread)


def _step(values: Array, resolution: float | None) -> float:
    """Return the step to which differences of these values are rounded."""
    noise = NOISE * float(np.abs(values).max(initial=0.0))
    return max(resolution or 0.0, noise) or 1.0


def wilcoxon(gain: Sequence[float] | Array) -> float:
    """Return the two-sided p-value of the signed-rank test, P(|W - E W| >= |w - E w|). Not for all zeros.

    This is scipy's test, except for few differences with ties or zeros. There scipy tries all 2^n signs, which takes
    seconds at n = 13. Here the rank sums are counted one difference at a time, with the same result.

    Args:
        gain: (n,), a difference of each pair.

    Raises:
        DataError: there is none, or one is not finite.
    """
    sample = as_sample(gain)
    # 0.72 - 0.71 and 0.33 - 0.32 differ only by rounding.
    sample = np.rint(sample / (1e-9 * np.abs(sample).max() or 1.0))
    sizes = np.abs(sample[sample != 0])
    if len(sample) > 13 or len(np.unique(sizes)) == len(sample):
        return float(stats.wilcoxon(sample).pvalue)
    # Midranks are multiples of one half.
    ranks = np.rint(2 * stats.rankdata(sizes)).astype(int)
    ways = np.ones(1)
    for rank in ranks:
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    off_centre = np.abs(2 * np.arange(len(ways)) - ranks.sum())
    observed = abs(2 * ranks[sample[sample != 0] > 0].sum() - ranks.sum())
    return float(ways[off_centre >= observed].sum() / ways.sum())


def standard_error(std_a: float, n_a: int, std_b: float, n_b: int) -> tuple[float, float]:
    """Return the standard error of the difference of two means and its degrees of freedom (Welch 1947).

    If neither sample has spread, the degrees of freedom are those of equal variances.

    Args:
        std_a: standard deviation of the one sample, n - 1.
        n_a: its values, >= 2.
        std_b: of the other.
        n_b: its values, >= 2.
    """
    variance_a, variance_b = std_a**2 / n_a, std_b**2 / n_b
    variance = variance_a + variance_b
    if variance == 0:
        return 0.0, float(n_a + n_b - 2)
    return sqrt(variance), variance**2 / (variance_a**2 / (n_a - 1) + variance_b**2 / (n_b - 1))


def half_width(error: float, df: float, confidence: float = CONFIDENCE) -> float:
    """Return half the width of a t-interval. scipy.stats would spend 100 microseconds on checks of each call."""
    return float(special.stdtrit(df, (1 + confidence) / 2)) * error


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Holm 1979). A missing test is nan, stays nan and is not counted.

    Args:
        p_values: from 0 to 1 each, or nan.

    Returns:
        The adjusted ones, in the same order.
    """
    adjusted = [nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if isfinite(p)), key=lambda i: p_values[i])
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
