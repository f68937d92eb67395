"""Statistics over seeds and tasks: every function takes plain numbers and knows nothing of runs, suites or papers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import cast

import numpy as np
from scipy import stats

from dipole.core.ground.errors import DataError
from dipole.core.measure.intervals import (
    Array,
    as_sample,
    as_samples,
    bootstrap_interval,
    interquartile_mean,
    percentiles,
)

REPETITIONS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (n - 1) and t-interval of one sample; the interval is nan for a single value."""

    n: int
    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Two objectives on their common seeds: difference (other - base), interval, two p-values and Cohen's d_z."""

    n: int
    difference: float
    low: float
    high: float
    p_t: float
    p_wilcoxon: float
    effect: float


@dataclass(frozen=True)
class WelchTest:
    """Two independent samples with unequal variances: difference (a - b), interval, degrees of freedom, p-value."""

    difference: float
    low: float
    high: float
    df: float
    p: float


@dataclass(frozen=True)
class Interval:
    """A point estimate with a bootstrap interval."""

    value: float
    low: float
    high: float


def summarize(values: Sequence[float], confidence: float = CONFIDENCE) -> Summary:
    """Mean over seeds with standard deviation and t-interval: mean +- t_{n-1} s / sqrt(n)."""
    sample = as_sample(values)
    n, mean = len(sample), float(sample.mean())
    if n == 1:
        return Summary(1, mean, nan, nan, nan)
    std = float(sample.std(ddof=1))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * std / sqrt(n)
    return Summary(n, mean, std, mean - half, mean + half)


def paired(base: Mapping[int, float], other: Mapping[int, float], confidence: float = CONFIDENCE) -> PairedTest:
    """Paired t-test and Wilcoxon signed-rank test of `other` against `base` on the seeds that both have.

    Fewer than two common seeds decide nothing: the p-values are nan. So it is with the t-test and the effect size where
    the difference is the same for every seed, which a coarse metric gives by chance: there is no spread to judge it by
    (scipy.stats.ttest_rel answers p = 0). No difference at all has p = 1.
    """
    seeds = sorted(base.keys() & other.keys())
    if not seeds:
        return PairedTest(0, nan, nan, nan, nan, nan, nan)
    gain = np.array([other[seed] - base[seed] for seed in seeds], dtype=np.float64)
    summary = summarize(gain.tolist(), confidence)
    if summary.n == 1:
        return PairedTest(1, summary.mean, nan, nan, nan, nan, nan)
    if not gain.any():
        return PairedTest(summary.n, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    if summary.std <= 1e-12 * abs(summary.mean):
        p_t, effect = nan, nan
    else:
        t = summary.mean / (summary.std / sqrt(summary.n))
        p_t, effect = float(2 * stats.t.sf(abs(t), summary.n - 1)), summary.mean / summary.std
    return PairedTest(summary.n, summary.mean, summary.low, summary.high, p_t, wilcoxon(gain), effect)


def wilcoxon(gain: Sequence[float] | Array) -> float:
    """Two-sided p-value of the signed-rank test of differences that are not all zero: P(|W - E W| >= |w - E w|).

    scipy's own, but for few differences with ties or zeros. There scipy goes through all 2^n signs, seconds at n = 13;
    here their rank sums are counted one difference at a time, with the same result.
    """
    sample = as_sample(gain)
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


def welch(
    mean_a: float, std_a: float, n_a: int, mean_b: float, std_b: float, n_b: int, confidence: float = CONFIDENCE
) -> WelchTest:
    """Welch's t-test from two triples of mean, standard deviation and n >= 2, as tables print them."""
    if min(n_a, n_b) < 2:
        raise DataError(f"Welch's test needs at least two values on each side, got {n_a} and {n_b}")
    variance_a, variance_b = std_a**2 / n_a, std_b**2 / n_b
    variance = variance_a + variance_b
    difference = mean_a - mean_b
    if variance == 0:
        return WelchTest(difference, difference, difference, float(n_a + n_b - 2), float(difference == 0))
    df = variance**2 / (variance_a**2 / (n_a - 1) + variance_b**2 / (n_b - 1))
    half = float(stats.t.ppf((1 + confidence) / 2, df)) * sqrt(variance)
    p = float(2 * stats.t.sf(abs(difference) / sqrt(variance), df))
    return WelchTest(difference, difference - half, difference + half, df, p)


def against_single_value(mean: float, std: float, n: int, printed: float, confidence: float = CONFIDENCE) -> WelchTest:
    """Our sample against one printed number without spread: it is taken as one further trial of our spread.

    The interval is that of a prediction, +- t_{n-1} s sqrt(1 + 1/n): wider than a test against a constant would give,
    because the printed number is itself the outcome of a random trial.
    """
    scale = std * sqrt(1 + 1 / n)
    difference = mean - printed
    if scale == 0:
        return WelchTest(difference, difference, difference, float(n - 1), float(difference == 0))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * scale
    p = float(2 * stats.t.sf(abs(difference) / scale, n - 1))
    return WelchTest(difference, difference - half, difference + half, float(n - 1), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment; nan (a test that could not be made) stays nan and does not count as a test."""
    adjusted = [nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if isfinite(p)), key=lambda i: p_values[i])
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def iqm(scores: Sequence[Sequence[float]] | Sequence[Array] | Array) -> float:
    """Interquartile mean of all runs of all tasks together: the mean of the middle half."""
    return interquartile_mean(np.concatenate(as_samples(scores)))


def iqm_interval(
    tasks: Sequence[Sequence[float]],
    confidence: float = CONFIDENCE,
    repetitions: int = REPETITIONS,
    seed: int = 0,
) -> Interval:
    """Interquartile mean with a stratified bootstrap interval: runs are redrawn inside every task.

    The interval is nan where no task has two runs: every redraw is the sample itself.
    """
    samples = as_samples(tasks)
    return Interval(iqm(samples), *bootstrap_interval(samples, "iqm", confidence, repetitions, seed))


def probability_of_improvement(
    ours: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
    confidence: float = CONFIDENCE,
    repetitions: int = REPETITIONS,
    seed: int = 0,
) -> Interval:
    """P(a run of ours beats a run of base), ties half, averaged over tasks (Agarwal et al. 2021).

    The interval is that of `iqm_interval`, and nan where neither side has two runs of a task.
    """
    if len(ours) != len(base):
        raise DataError(f"probability of improvement compares the same tasks, got {len(ours)} and {len(base)}")
    left, right = as_samples(ours), as_samples(base)
    generator = np.random.default_rng(seed)
    beats = [_beats(x, y) for x, y in zip(left, right, strict=True)]
    value = float(np.mean([task.mean() for task in beats]))
    if max(map(len, [*left, *right])) == 1:
        return Interval(value, nan, nan)
    # A redraw is how often each run was drawn, so that no pair of a redraw is ever listed.
    rows = [_times_drawn(len(x), repetitions, generator) for x in left]
    columns = [_times_drawn(len(y), repetitions, generator) for y in right]
    shares = [((a @ task) * b).sum(axis=1) / task.size for a, task, b in zip(rows, beats, columns, strict=True)]
    return Interval(value, *percentiles(np.mean(shares, axis=0), confidence))


def power(difference: float, std: float, n: int, alpha: float = 0.05, is_paired: bool = False) -> float:
    """Power of the two-sided t-test with n seeds per arm, from the noncentral t distribution.

    `std` is the spread of one arm, or of the seed-wise differences when `is_paired`. One seed has no power.
    """
    if n < 2:
        return 0.0
    if std == 0:
        return 1.0 if difference else alpha
    df = n - 1 if is_paired else 2 * (n - 1)
    shift = abs(difference) / std * sqrt(n if is_paired else n / 2)
    critical = float(stats.t.ppf(1 - alpha / 2, df))
    # The other tail is below 1e-9 from a shift of 6 on, where scipy's distribution begins to answer nan.
    other_tail = float(stats.nct.cdf(-critical, df, shift)) if shift < 6 else 0.0
    return float(stats.nct.sf(critical, df, shift)) + other_tail


def seeds_needed(
    difference: float,
    std: float,
    target: float = 0.8,
    alpha: float = 0.05,
    is_paired: bool = False,
    limit: int = 1_000_000,
) -> int | None:
    """Smallest number of seeds per arm that shows `difference` with probability `target`; None beyond `limit`."""
    if not (isfinite(difference) and isfinite(std)) or std < 0:
        return None
    if difference == 0:
        return None
    low, high = 1, 2
    while power(difference, std, high, alpha, is_paired) < target:
        if high >= limit:
            return None
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if power(difference, std, middle, alpha, is_paired) < target:
            low = middle
        else:
            high = middle
    return high


def pooled_std(std_a: float, std_b: float) -> float:
    """Root of the mean variance of two arms of equal size: the spread `seeds_needed` wants for two printed cells."""
    return sqrt((std_a**2 + std_b**2) / 2)


def _times_drawn(n: int, repetitions: int, generator: np.random.Generator) -> Array:
    """How often each of n runs is drawn when n are drawn with replacement: (R, n), rows of sum n."""
    drawn = generator.integers(0, n, size=(repetitions, n)) + n * np.arange(repetitions)[:, None]
    return np.bincount(drawn.ravel(), minlength=n * repetitions).reshape(repetitions, n).astype(np.float64)


def _beats(x: Array, y: Array) -> Array:
    """1 where a run of x (n,) beats one of y (m,), one half for a tie: (n, m)."""
    return cast(Array, (x[:, None] > y) + 0.5 * (x[:, None] == y))
