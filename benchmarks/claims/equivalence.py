"""Tests of a bound: whether a quantity is inside a region, outside of it, or undecided, from plain numbers.

A region is `low` to `high`, either of them infinite: (0, inf) is a direction, (5, inf) superiority by a margin, (-2, 2)
equivalence by two one-sided tests. Evidence is a pair of one-sided p-values, and 1 is no evidence at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt

from scipy import special

from dipole.benchmarks.statistics import Summary, pooled_std, standard_error, summarize
from dipole.benchmarks.statistics.differences import half_width
from dipole.benchmarks.statistics.estimates import NOISE, pairs_are_better
from dipole.benchmarks.statistics.power import least_shift


@dataclass(frozen=True)
class Evidence:
    """Evidence on whether a quantity is in a region: two one-sided p-values from 0 to 1, where 1 is no evidence.

    `inside` is small if the quantity is shown to be in the region, `outside` if it is shown to be outside.
    """

    inside: float = 1.0
    outside: float = 1.0

    @property
    def p(self) -> float:
        """Two-sided: twice the smaller one, so that below 0.05 the 95 % interval is all inside, or all outside."""
        return min(1.0, 2 * min(self.inside, self.outside))

    @property
    def is_for(self) -> bool:
        """True if it speaks for the region."""
        return self.inside < self.outside


NOTHING = Evidence()


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and degrees of freedom. The error is nan if nothing was drawn twice.

    `spread` is that of one seed, or of a pair of seeds if they are paired. The number of seeds follows from it.
    """

    value: float
    error: float = nan
    df: float = nan
    spread: float = nan
    is_paired: bool = True

    def interval(self) -> tuple[float, float]:
        """Return the 95 % t-interval, nan without a spread."""
        half = half_width(self.error, self.df)
        return self.value - half, self.value + half

    @property
    def p(self) -> float:
        """Two-sided p-value of 0. Without a spread it is 1 for 0, and nan for any other value."""
        if isfinite(self.error):
            return 2 * _tail(abs(self.value) / self.error, self.df)
        return nan if self.value else 1.0


def of_pairs(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Return one - other on the seeds that both have, or by Welch on all seeds if `pairs_are_better` denies it.

    If the difference is the same for every seed, the two sides count as independent samples.
    """
    gaps = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if pairs_are_better(len(gaps), len(one), len(other)):
        found = of_sample(gaps, max(map(abs, [*one.values(), *other.values()])))
        if found.error > 0:
            return found
    if gaps and min(len(one), len(other)) == 1:
        return Estimate(gaps[0])
    return of_summaries(summarize(list(one.values())), summarize(list(other.values())))


def of_sample(values: Sequence[float], scale: float = 0.0) -> Estimate:
    """Return the mean of a sample with s / sqrt(n), nan if all values are equal up to rounding at this scale."""
    found = summarize(values)
    if found.n < 2 or found.std <= NOISE * max(scale, abs(found.mean)):
        return Estimate(found.mean)
    return Estimate(found.mean, found.std / sqrt(found.n), found.n - 1, found.std)


def of_summaries(one: Summary, other: Summary) -> Estimate:
    """Return one - other by Welch, from mean, standard deviation and n alone, as tables print them."""
    value = one.mean - other.mean
    if not isfinite(one.std + other.std) or min(one.n, other.n) < 2:
        return Estimate(value)
    error, df = standard_error(one.std, one.n, other.std, other.n)
    if error <= NOISE * max(abs(one.mean), abs(other.mean)):
        return Estimate(value)
    return Estimate(value, error, df, pooled_std(one.std, other.std), is_paired=False)


def of_one_more_trial(sample: Summary, value: float) -> Estimate:
    """Return the mean of a sample less a single number, which counts as one more trial of the sample's spread.

    The interval is a prediction interval, +- t_{n-1} s sqrt(1 + 1/n). It is wider than that of a test against a
    constant, because the number is itself the outcome of a random trial.
    """
    error, df = sample.std * sqrt(1 + 1 / sample.n), sample.n - 1
    return Estimate(sample.mean - value, error or nan, df, sample.std)


def against(found: Estimate, low: float, high: float) -> Evidence:
    """Test an estimate against a region with t-tests.

    Inside: two one-sided tests (Schuirmann 1987), p = max(P(T >= (x - low) / e), P(T >= (high - x) / e)).
    Outside: from the nearer bound, P(T >= d / e) + P(T >= (d + high - low) / e) with d the distance beyond it.
    """
    if not isfinite(found.error):
        return NOTHING
    above, below = (found.value - low) / found.error, (high - found.value) / found.error
    beyond = max(-above, -below)
    inside = max(_tail(above, found.df), _tail(below, found.df))
    outside = _tail(beyond, found.df) + _tail(beyond + (high - low) / found.error, found.df)
    return Evidence(inside, min(1.0, outside))


def smaller_spread(one: Summary, other: Summary) -> Evidence:
    """Test sigma_one < sigma_other with F = s_one^2 / s_other^2. Two spreads of 0 are no evidence."""
    if min(one.n, other.n) < 2 or not isfinite(one.std + other.std) or one.std == other.std == 0:
        return NOTHING
    if other.std == 0:
        return Evidence(1.0, 0.0)
    f, degrees = one.std**2 / other.std**2, (one.n - 1, other.n - 1)
    return Evidence(float(special.fdtr(*degrees, f)), float(special.fdtrc(*degrees, f)))


def count(evidence: Sequence[Evidence], least: int) -> Evidence:
    """Test that at least `least` of k statements are true, against the null that fewer are.

    Partial conjunction (Benjamini and Heller 2008), valid however the tests depend on each other: with p sorted,
    inside = (k - least + 1) p_(least). It is the largest p if all must be true (intersection-union), and
    Bonferroni's if one must. Outside: that k - least + 1 are false, by the same rule.

    A binomial test over tasks would ask whether tasks are drawn from a half-half population: with six it can never
    say that four of them gain. Here the tasks are those that are named, and each is tested by its own seeds.
    """
    k = len(evidence)
    if not 1 <= least <= k:
        return NOTHING
    false = k - least + 1
    inside = false * sorted(each.inside for each in evidence)[least - 1]
    outside = least * sorted(each.outside for each in evidence)[false - 1]
    return Evidence(min(1.0, inside), min(1.0, outside))


def every(evidence: Sequence[Evidence]) -> Evidence:
    """Test that all are true: the intersection-union test. One false statement is enough against it (Bonferroni)."""
    return count(evidence, len(evidence))


def any_of(evidence: Sequence[Evidence]) -> Evidence:
    """Test that at least one is true."""
    return count(evidence, 1)


def average(found: Sequence[Estimate], gaps: Sequence[Mapping[int, float]]) -> Estimate:
    """Return the mean of several estimates: over the seeds that all share, or by the mean of their errors.

    The second is the widest that any dependence between them allows, by Minkowski's inequality. It is taken if an
    estimate is not of pairs (no gaps), or if few seeds are shared (`pairs_are_better`).
    """
    shared, most = set.intersection(*map(set, gaps)), max(map(len, gaps))
    if pairs_are_better(len(shared), most, most):
        means = [sum(each[seed] for each in gaps) / len(gaps) for seed in sorted(shared)]
        return of_sample(means, max(abs(value) for each in gaps for value in each.values()))
    k = len(found)
    value = sum(each.value for each in found) / k
    if not all(isfinite(each.error) for each in found):
        return Estimate(value)
    error, spread = sum(each.error for each in found) / k, sum(each.spread for each in found) / k
    return Estimate(value, error, min(each.df for each in found), spread, all(each.is_paired for each in found))


def reach(found: Estimate) -> float:
    """Return the smallest distance from a bound that the seeds show with 80 % power, or nan without a spread."""
    if not isfinite(found.error):
        return nan
    return found.error * least_shift(found.df)


def _tail(t: float, df: float) -> float:
    """P(T > t)."""
    return float(special.stdtr(df, -t)) if isfinite(t) else float(t < 0)
