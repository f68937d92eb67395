"""Mean of one sample, tests of the difference between two, and the correction for many tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import fsum, isfinite, isnan, nan, sqrt
from statistics import fmean

import numpy as np
from scipy import special

from dipole.core.evaluation.intervals import Array, as_sample
from dipole.core.utils.errors import DataError

CONFIDENCE = 0.95
LEVEL = 0.05
"""A difference is significant, and a verdict made, if the corrected p-value is smaller."""
NOISE = 5e-7
"""Values that differ by less than this share of their size are equal: records hold numbers of single precision."""
NEEDED = 2
"""Runs of a task, or pairs of them, from which on there is an interval."""


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
class Estimate:
    """A mean, or a difference of two means, with its standard error and degrees of freedom: nan without spread.

    `spread` is the standard deviation of one seed, or of a pair of seeds if they are paired. The number of seeds that
    a test needs follows from it. `gaps` are the differences by seed, if pairs are compared.
    """

    value: float
    error: float = nan
    df: float = nan
    spread: float = nan
    is_paired: bool = True
    gaps: Mapping[int, float] = field(default_factory=dict, repr=False)

    def times(self, sign: int) -> "Estimate":
        """Return the estimate itself for 1, and of the opposite difference for -1."""
        return replace(self, value=sign * self.value, gaps={seed: sign * gap for seed, gap in self.gaps.items()})

    def interval(self) -> tuple[float, float]:
        """Return the 95 % t-interval, nan without a spread."""
        half = float(special.stdtrit(self.df, (1 + CONFIDENCE) / 2)) * self.error
        return self.value - half, self.value + half

    @property
    def p(self) -> float:
        """Two-sided p-value of 0. Without a spread it is 1 for 0, and nan for any other value."""
        if isfinite(self.error):
            return 2 * tail(abs(self.value) / self.error, self.df)
        return nan if self.value else 1.0


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


def summarize(values: Sequence[float]) -> Summary:
    """Return the mean over seeds with standard deviation and t-interval: mean +- t_{n-1} s / sqrt(n).

    Equal values have no interval.

    Args:
        values: (n >= 1,).

    Raises:
        DataError: there are no values, or one is not finite.
    """
    sample = as_sample(values).tolist()
    found = of_sample(sample, max(map(abs, sample)))
    return Summary(len(sample), found.value, found.spread, *found.interval())


def of_sample(values: Sequence[float], scale: float = 0.0) -> Estimate:
    """Return the mean of a sample with s / sqrt(n), nan if all values are equal up to rounding at this scale."""
    n = len(values)
    mean = sum(values) / n
    if n < NEEDED:
        return Estimate(mean)
    std = sqrt(fsum((value - mean) ** 2 for value in values) / (n - 1))
    if std <= NOISE * max(scale, abs(mean)):
        return Estimate(mean, spread=std)
    return Estimate(mean, std / sqrt(n), n - 1, std)


def of_summaries(one: Summary, other: Summary) -> Estimate:
    """Return one - other (Welch 1947) from mean, standard deviation and n alone, as tables print them."""
    value, n_one, n_other = one.mean - other.mean, one.n, other.n
    if not isfinite(one.std + other.std) or min(n_one, n_other) < NEEDED:
        return Estimate(value)
    a, b = one.std**2 / n_one, other.std**2 / n_other
    if sqrt(a + b) <= NOISE * max(abs(one.mean), abs(other.mean)):
        return Estimate(value)
    df = (a + b) ** 2 / (a**2 / (n_one - 1) + b**2 / (n_other - 1))
    return Estimate(value, sqrt(a + b), df, pooled_std(one.std, other.std), is_paired=False)


def of_pairs(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Return one - other on the seeds that both have, or by Welch on all seeds if `pairs_are_better` denies it.

    If the difference is the same for every seed, the two sides count as independent samples.
    """
    gaps = {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}
    if is_paired := pairs_are_better(len(gaps), len(one), len(other)):
        found = of_sample(list(gaps.values()), max(map(abs, [*one.values(), *other.values()])))
        if isfinite(found.error):
            return replace(found, gaps=gaps)
    elif gaps and min(len(one), len(other)) == 1:
        return Estimate(next(iter(gaps.values())))
    apart = of_summaries(summarize(list(one.values())), summarize(list(other.values())))
    return replace(apart, gaps=gaps if is_paired else {})


def of_one_more_trial(sample: Summary, value: float) -> Estimate:
    """Return the mean of a sample less a single number, which counts as one more trial of the sample's spread.

    The interval is a prediction interval, +- t_{n-1} s sqrt(1 + 1/n). It is wider than that of a test against a
    constant, because the number is itself the outcome of a random trial.
    """
    error, df = sample.std * sqrt(1 + 1 / sample.n), sample.n - 1
    return Estimate(sample.mean - value, error or nan, df, sample.std)


def average(found: Sequence[Estimate]) -> Estimate:
    """Return the mean of several estimates: over the seeds that all share, or by the mean of their errors.

    The second is the widest that any dependence between them allows, by Minkowski's inequality. It is taken if an
    estimate is not of pairs (no gaps), or if few seeds are shared (`pairs_are_better`).
    """
    if len(found) == 1:
        return found[0]
    gaps = [each.gaps for each in found]
    shared, most = set.intersection(*map(set, gaps)), max(map(len, gaps))
    if pairs_are_better(len(shared), most, most):
        means = [fmean(each[seed] for each in gaps) for seed in sorted(shared)]
        return of_sample(means, max(abs(value) for each in gaps for value in each.values()))
    value = fmean(each.value for each in found)
    if not all(isfinite(each.error) for each in found):
        return Estimate(value)
    error, spread = fmean(each.error for each in found), fmean(each.spread for each in found)
    return Estimate(value, error, min(each.df for each in found), spread, all(each.is_paired for each in found))


def pairs_are_better(common: int, ours: int, base: int) -> bool:
    """Whether to compare the pairs of common seeds, and not all seeds of both sides as two samples.

    The numbers of seeds decide, so the test has its level whatever the values are. Pairs are better if both sides have
    the same seeds, or if the interval of the pairs is the narrower one at a correlation of 1/2:
    t_{common - 1} / sqrt(common) <= t_{ours + base - 2} sqrt(1 / ours + 1 / base). With 20 seeds on each side they
    need 12 common ones.
    """
    if common < NEEDED or common == max(ours, base):
        return common >= NEEDED
    of_pairs = special.stdtrit(common - 1, 0.975) ** 2 / common
    return bool(of_pairs <= special.stdtrit(ours + base - 2, 0.975) ** 2 * (1 / ours + 1 / base))


def pooled_std(std_a: float, std_b: float) -> float:
    """Root of the mean variance of two arms of equal size: the spread `seeds_needed` wants for two printed cells."""
    return sqrt((std_a**2 + std_b**2) / 2)


def tail(t: float, df: float) -> float:
    """Return P(T > t)."""
    return float(special.stdtr(df, -t)) if isfinite(t) else float(t < 0)


def difference(base: Mapping[int, float], other: Mapping[int, float]) -> PairedTest:
    """Test one objective against another: on common seeds (paired), or on all seeds as independent samples (Welch).

    `pairs_are_better` decides by the numbers of seeds, and `method` names the test. If all pairs have the
    same nonzero difference, the pairs have no spread (`paired`). Then the samples are compared as independent ones.

    Args:
        base: values by seed.
        other: values by seed.

    Raises:
        DataError: a value is not finite, or they are not by seed.
    """
    pairs, fewest = paired(base, other), min(len(base), len(other))
    if fewest < NEEDED or (not isnan(pairs.p_t) and pairs_are_better(pairs.n, len(other), len(base))):
        return pairs
    found = of_summaries(summarize(list(other.values())), summarize(list(base.values())))
    every, larger = np.array([*other.values(), *base.values()]), max(len(other), len(base))
    levels = _levels(every, NOISE * float(np.abs(every).max()))
    from scipy import stats  # late: it takes a second

    p_ranks = float(stats.mannwhitneyu(levels[: len(other)], levels[len(other) :]).pvalue)
    spread = found.error / sqrt(1 / fewest + 1 / larger)
    return PairedTest(fewest, found.value, *found.interval(), found.p, p_ranks, nan, "Welch", spread, larger)


def paired(base: Mapping[int, float], other: Mapping[int, float]) -> PairedTest:
    """Paired t-test and Wilcoxon signed-rank test of `other` against `base` on the seeds that both have.

    Fewer than two common seeds decide nothing: the p-values are nan. So it is with the t-test and the effect size where
    the difference is the same for every seed, which a coarse metric gives by chance: there is no spread to judge it by
    (scipy.stats.ttest_rel answers p = 0), and no interval. No difference at all has p = 1.
    """
    if not (isinstance(base, Mapping) and isinstance(other, Mapping)):
        raise DataError("both are values by seed, such as {0: 0.91, 1: 0.93}. Of lists, give dict(enumerate(values)).")
    seeds = sorted(base.keys() & other.keys())
    if not seeds:
        return PairedTest(0, nan, nan, nan, nan, nan, nan)
    x, y = (as_sample([side[seed] for seed in seeds]) for side in (other, base))
    gain, n = x - y, len(seeds)
    if n < NEEDED:
        return PairedTest(n, float(gain.mean()), nan, nan, nan, nan, nan)
    ranked = _signed_levels(gain, NOISE * float(np.abs([x, y]).max()))
    if not ranked.any():
        return PairedTest(n, 0.0, nan, nan, 1.0, 1.0, 0.0)
    if (ranked == ranked[0]).all():
        return PairedTest(n, float(gain.mean()), nan, nan, nan, wilcoxon(ranked), nan)
    spread = float(gain.std(ddof=1))
    found = Estimate(float(x.mean() - y.mean()), spread / sqrt(n), n - 1)
    effect = found.value / spread
    return PairedTest(n, found.value, *found.interval(), found.p, wilcoxon(ranked), effect, spread=spread)


def _levels(values: Array, noise: float) -> Array:
    """Number values by their size. A value within the noise of the next smaller one is equal to it."""
    order = np.argsort(values)
    levels = np.zeros(len(values))
    levels[order[1:]] = np.cumsum(np.diff(values[order]) > noise)
    return levels


def _signed_levels(gain: Array, noise: float) -> Array:
    """Number differences by their absolute size, with their signs. Those within the noise of 0 are 0."""
    return np.sign(gain) * _levels(np.abs([*gain, 0.0]), noise)[:-1]


def wilcoxon(gain: Sequence[float] | Array) -> float:
    """Return the two-sided p-value of the signed-rank test, P(|W - E W| >= |w - E w|). Not for all zeros.

    This is scipy's test, but of few differences all 2^n signs are one matrix, with the same result. scipy takes
    seconds at n = 13 if there are ties or zeros.
    """
    sample = as_sample(gain)
    # 0.72 - 0.71 and 0.33 - 0.32 differ only by rounding.
    sample = _signed_levels(sample, 1e-9 * float(np.abs(sample).max()))
    sizes = np.abs(sample[sample != 0])
    if len(sample) > 13:
        from scipy import stats

        return float(stats.wilcoxon(sample).pvalue)
    # Midranks are multiples of one half, so their sums are exact.
    signs, others = np.array(list(product((-1, 1), repeat=len(sizes)))), sizes[:, None]
    ranks = (others > sizes).sum(1) + ((others == sizes).sum(1) + 1) / 2
    observed = np.sign(sample[sample != 0]) @ ranks
    return float((np.abs(signs @ ranks) >= abs(observed)).mean())


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


def number(value: float) -> str:
    """Format a number with about four digits.

    Args:
        value: the number.
    """
    if value == 0:
        return f"{value:.3f}"
    for least, form in ((1e6, ".2e"), (1000, ".0f"), (100, ".1f"), (1, ".2f"), (0.001, ".3f")):
        if abs(value) >= least:
            return f"{value:{form}}"
    return f"{value:.2g}"
