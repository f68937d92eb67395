"""The statistics against independent references: plain loops, other routines of scipy, simulation, printed figures."""

import random
import time
import tracemalloc
from math import isnan, nan, sqrt

import numpy as np
import pytest
from scipy import integrate, stats

from dipole.benchmarks.critical import critical_difference, performance_profile
from dipole.benchmarks.statistics import (
    Summary,
    detectable,
    difference,
    holm,
    iqm_interval,
    paired,
    pooled_std,
    power,
    probability_of_improvement,
    relative_gain,
    seeds_needed,
    summarize,
    wilcoxon,
)
from dipole.benchmarks.statistics.differences import average, of_one_more_trial, of_pairs, of_summaries
from dipole.core.evaluation.intervals import interquartile_mean
from dipole.core.utils.errors import DataError

BASE = {0: 71.2, 1: 69.8, 2: 73.1, 3: 70.4, 4: 72.0, 9: 10.0}
OTHER = {0: 72.9, 1: 70.1, 2: 73.0, 3: 72.8, 4: 73.5, 7: 99.0}


def test_summaries_and_differences_without_spread():
    values = [3.0, 5.0, 8.0, 8.5]
    mean = sum(values) / 4
    std = sqrt(sum((v - mean) ** 2 for v in values) / 3)
    found = summarize(values)
    assert (found.n, found.mean, found.std) == (4, pytest.approx(mean), pytest.approx(std))
    low, high = stats.t.interval(0.95, 3, loc=mean, scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert isnan(summarize([4.0]).std)
    with pytest.raises(DataError, match="non-empty"):
        summarize([])
    with pytest.raises(DataError, match="nan"):
        summarize([1.0, float("nan")])
    same = paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (same.p_t, same.p_wilcoxon, same.effect) == (1.0, 1.0, 0.0)
    shifted = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 3.0, 2: 4.0})
    assert (shifted.difference, shifted.p_wilcoxon) == (1.0, 0.25)
    assert isnan(shifted.p_t)
    assert isnan(shifted.effect)
    # The same in floating point, where the differences are equal only up to rounding.
    assert isnan(paired({0: 0.1, 1: 0.7}, {0: 0.3, 1: 0.9}).p_t)


def test_paired_uses_only_common_seeds_and_agrees_with_scipy():
    found = paired(BASE, OTHER)
    common = [0, 1, 2, 3, 4]
    x, y = [OTHER[s] for s in common], [BASE[s] for s in common]
    reference = stats.ttest_rel(x, y)
    low, high = reference.confidence_interval()
    assert found.n == 5
    assert found.p_t == pytest.approx(reference.pvalue)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    gains = [a - b for a, b in zip(x, y, strict=True)]
    mean = sum(gains) / 5
    assert found.effect == pytest.approx(mean / sqrt(sum((g - mean) ** 2 for g in gains) / 4))
    for few in ({}, {0: 1.0}):  # too few common seeds decide nothing
        assert isnan(paired({0: 0.5, 1: 0.6}, few).p_t)


def test_welch_agrees_with_scipy_from_statistics_and_data():
    x, y = [1.0, 4.0, 2.5, 3.0], [6.0, 2.0, 9.0]
    reference = stats.ttest_ind(x, y, equal_var=False)
    a, b = summarize(x), summarize(y)
    found = of_summaries(a, b)
    assert (found.p, found.df) == (pytest.approx(reference.pvalue), pytest.approx(reference.df))
    assert found.interval() == pytest.approx(tuple(reference.confidence_interval()))


def test_printed_values_and_three_seeds():
    """LMCL Table 5: over 6 tasks and 3 bases the smallest of 18 Welch p-values of X + DP against X is 0.60."""
    curl = [(413, 53, 423, 63), (680, 32, 682, 13), (908, 86, 926, 73), (298, 38, 296, 32), (621, 121, 625, 53)]
    curl.append((826, 42, 842, 27))
    sides = [(Summary(3, d, sd, nan, nan), Summary(3, m, s, nan, nan)) for m, s, d, sd in curl]
    assert min(of_summaries(*both).p for both in sides) > 0.59
    generator = np.random.default_rng(0)
    ours, printed = generator.normal(size=(4000, 5)), generator.normal(size=4000)
    rejected = [of_one_more_trial(summarize(row), value).p < 0.05 for row, value in zip(ours, printed, strict=True)]
    assert np.mean(rejected) == pytest.approx(0.05, abs=0.012)


def test_holm_by_its_definition():
    p = [0.01, 0.04, 0.03, 0.005]
    order = sorted(range(4), key=p.__getitem__)
    expected = [0.0] * 4
    for rank, index in enumerate(order):
        expected[index] = max(min(1.0, (4 - j) * p[order[j]]) for j in range(rank + 1))
    assert holm(p) == pytest.approx(expected)
    assert expected == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # Tests that could not be made are skipped.
    assert holm([0.02, float("nan"), 0.5]) == pytest.approx([0.04, float("nan"), 0.5], nan_ok=True)


def test_iqm_and_probability_of_improvement_by_hand():
    assert interquartile_mean([1, 2, 3, 100, 0, 4, 5, 6]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert iqm_interval([[1, 2, 3, 100], [0, 4, 5, 6]]).value == pytest.approx((2 + 3 + 4 + 5) / 4)
    generator = np.random.default_rng(2)
    ours, base = generator.integers(0, 6, size=(3, 7)).tolist(), generator.integers(0, 5, size=(3, 4)).tolist()
    expected = np.mean([stats.mannwhitneyu(x, y).statistic / 28 for x, y in zip(ours, base, strict=True)])
    found = probability_of_improvement(ours, base)
    assert found.value == pytest.approx(expected)
    assert found.low <= found.value <= found.high
    with pytest.raises(DataError, match="same tasks"):
        probability_of_improvement(ours, base[:2])
    # Of four tasks half would be left. From eight on the quarters at both ends go.
    base = [[1.0, 1.1, 0.9]] * 8
    ours = [[1.0 + gain, 1.1 + gain, 0.9 + 1.1 * gain] for gain in (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 8.0)]
    assert relative_gain(ours[4:], base[4:]).value == pytest.approx(sum((0.4, 0.5, 0.6, 8.0)) / 4 * 3.1 / 3)
    assert relative_gain(ours, base).value == pytest.approx(sum((0.2, 0.3, 0.4, 0.5)) / 4 * 3.1 / 3)


def test_the_interval_of_the_interquartile_mean_is_stratified_and_holds_where_the_bootstrap_is_too_narrow():
    generator = np.random.default_rng(3)
    tasks = [generator.normal(m, 1, size=n).tolist() for m, n in [(0, 50), (10, 50), (20, 40)]]
    found = iqm_interval(tasks, runs="abc")
    assert found == iqm_interval(tasks, runs="abc")
    plain = random.Random(7)
    draws = sorted(interquartile_mean([plain.choice(task) for task in tasks for _ in task]) for _ in range(3000))
    # From many runs on it is that of redrawing inside every task; where few are known it is wider.
    assert found.low == pytest.approx(draws[int(0.025 * 3000)], abs=0.1)
    assert found.high == pytest.approx(draws[int(0.975 * 3000)], abs=0.1)
    few = iqm_interval([task[:4] for task in tasks], runs="abc")
    # Unstratified redrawing would mix tasks of level 0 and 20 and give an interval many units wide.
    assert found.high - found.low < few.high - few.low < 4


def test_sample_sizes_and_detectable_differences_are_the_textbooks():
    """Cohen 1988, alpha 0.05 two-sided, power 0.8: 26 / 64 / 394 per arm for d = 0.8 / 0.5 / 0.2; 34 pairs for 0.5."""
    assert [seeds_needed(d, 1.0) for d in (0.8, 0.5, 0.2)] == [26, 64, 394]
    assert seeds_needed(0.5, 1.0, is_paired=True) == 34
    # LMCL Table 5, Catch: 842 +- 27 against 826 +- 42.
    assert abs(seeds_needed(842 - 826, pooled_std(27, 42)) - 75) <= 3
    n = seeds_needed(3.0, 4.0)
    assert power(3.0, 4.0, n) >= 0.8 > power(3.0, 4.0, n - 1)
    assert (seeds_needed(3.0, 4.0, limit=n), seeds_needed(3.0, 4.0, limit=n - 1)) == (n, None)
    assert [seeds_needed(d, 1.0) for d in (0.0, float("nan"), 1e-6)] == [None] * 3
    assert seeds_needed(1.0, 0.0) == 2
    assert power(1.0, 1.0, 1) == 0.0
    assert isnan(power(nan, 1.0, 5))
    for d, n in ((0.8, 26), (0.5, 64), (0.2, 394)):
        assert detectable(1.0, n) <= d < detectable(1.0, n - 1)
    assert detectable(1.0, 34, is_paired=True) <= 0.5 < detectable(1.0, 33, is_paired=True)
    assert np.isnan(detectable(1.0, 1))
    assert detectable(0.0, 5) == 0
    found = [power(1.0, 1.0, n) for n in [*range(2, 120), 500, 1000, 2700, 100_000]]
    assert np.diff(found).min() > -1e-12
    assert max(found) == found[-1] == 1.0


@pytest.mark.parametrize("is_paired", [True, False])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 100])
@pytest.mark.parametrize("n", [2, 3, 20, 64, 1000])
def test_the_detectable_difference_is_the_smallest_that_has_the_power(n, alpha, is_paired):
    least = detectable(3.0, n, alpha=alpha, is_paired=is_paired)
    assert power(least, 3.0, n, alpha, is_paired) == pytest.approx(0.8, abs=1e-6)
    assert seeds_needed(least, 3.0, alpha=alpha, is_paired=is_paired) == n
    assert detectable(3.0, n, 0.9, alpha, is_paired) > least


@pytest.mark.parametrize(
    "gain", [[1, 1, 2], [1, -1, 2, 2], [0, 1, 2], [0, 0, 1], [0.1, 0.2, 0.2, -0.3], [2, -2], [1] * 6, [3, -1, -1, 0, 2]]
)
def test_wilcoxon_with_ties_and_zeros_is_that_of_scipy(gain):
    exact = stats.PermutationMethod(n_resamples=10_000)  # all signs; with ties SciPy before 1.15 takes the normal law
    assert wilcoxon(gain) == pytest.approx(stats.wilcoxon(gain, method=exact).pvalue)


def test_wilcoxon_with_ties_takes_no_time():
    """scipy goes through 2^13 permutations for these, three seconds per cell of a report."""
    began = time.process_time()
    for _ in range(20):
        wilcoxon([1.0, 1.0, *range(2, 13)])
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("n", "other", "alpha"), [(2, 2, 0.05), (3, 3, 0.05), (5, 5, 0.002), (3, 20, 0.01), (9, 4, 0.05)]
)
def test_power_of_few_seeds_is_that_of_welchs_test(n, other, alpha):
    """At three seeds the t-test of 2 (n - 1) degrees of freedom has 5 points more power than the test that is made."""
    generator = np.random.default_rng(n)
    gap = detectable(1.0, n, 0.6, alpha, other=other)
    x, y = generator.normal(gap, 1.0, (40_000, n)), generator.normal(0, 1.0, (40_000, other))
    found = np.mean(stats.ttest_ind(x, y, axis=1, equal_var=False).pvalue < alpha)
    assert [power(gap, 1.0, n, alpha, other=other), found] == pytest.approx([0.6, 0.6], abs=0.008)


@pytest.mark.parametrize(("n", "tests"), [(2, 10), (2, 100), (3, 42), (4, 1000), (20, 81)])
def test_the_power_of_pairs_is_exact_at_small_levels(n, tests):
    """Integrated over the standard normal part of T, where 64 nodes over the spread were up to 2 % off."""
    alpha = 0.05 / tests
    critical = stats.t.isf(alpha / 2, n - 1)
    shift = sqrt(n) * detectable(1.0, n, alpha=alpha, is_paired=True)

    def beyond(z):
        return stats.norm.pdf(z) * stats.chi2.cdf((n - 1) * ((shift + z) / critical) ** 2, n - 1)

    assert integrate.quad(beyond, -9, 9, limit=200, epsabs=1e-11)[0] == pytest.approx(0.8, abs=1e-7)


@pytest.mark.parametrize(
    ("ours", "base", "method"),
    [
        (range(20), range(20), "paired t"),
        (range(18, 38), range(20), "Welch"),  # 2 common seeds of 20
        (range(2), range(20), "Welch"),
        (range(8, 28), range(20), "paired t"),
        (range(9, 29), range(20), "Welch"),
        (range(3), range(3), "paired t"),
        (range(1, 4), range(3), "Welch"),
    ],
)
def test_the_test_with_the_narrower_interval_is_made(ours, base, method):
    """At a correlation of one half, by the numbers of seeds. A choice by values would find too much by chance."""
    generator = np.random.default_rng(5)
    values = {seed: generator.normal() for seed in range(40)}
    a = {seed: values[seed] + generator.normal() for seed in base}
    b = {seed: values[seed] + generator.normal() for seed in ours}
    found = difference(a, b)
    assert found.method == method
    x, y = list(b.values()), list(a.values())
    expected = stats.ttest_ind(x, y, equal_var=False)
    if method == "paired t":
        common = sorted(a.keys() & b.keys())
        expected = stats.ttest_rel([b[s] for s in common], [a[s] for s in common])
    assert [found.p_t, of_pairs(b, a).p] == pytest.approx([expected.pvalue] * 2, rel=1e-9)
    # So does the mean of two comparisons. Each has 20 independent draws, or pairs of seeds that they share.
    half = [{seed: b[seed] - a[seed] for seed in b.keys() & a.keys()} if method == "paired t" else {}] * 2
    assert average([of_pairs(b, a)] * 2, half).p == pytest.approx(expected.pvalue, rel=1e-9)


@pytest.mark.parametrize(("gap", "n"), [(0.6034, 1000), (1.61, 100), (20, 2), (38, 3), (1e6, 5)])
def test_power_has_no_holes_far_out(gap, n):
    """Where scipy answers nan for the other tail: two samples that far apart are always told apart."""
    assert power(gap, 1.0, n) == pytest.approx(1.0, abs=0.02)


def test_one_run_per_task_has_an_estimate_and_no_interval():
    found = iqm_interval([[1.0], [3.0]])
    assert found.value == 2.0
    assert isnan(found.low)
    beats = probability_of_improvement([[1.0], [3.0]], [[0.0], [4.0]])
    assert beats.value == 0.5
    assert isnan(beats.high)
    # One run of the base tells nothing of its spread, however many of ours beat it.
    assert isnan(probability_of_improvement([[1.0, 1.0]], [[0.0]]).low)
    for nothing in (iqm_interval, lambda tasks: probability_of_improvement(tasks, tasks)):
        with pytest.raises(DataError, match="at least"):
            nothing([])


def test_the_probability_of_improvement_of_many_seeds_needs_no_table_of_all_pairs_of_all_redraws():
    """Its interval for 300 normal runs a side is that of the Mann-Whitney statistic: P +- 1.96 / sqrt(6 n)."""
    generator = np.random.default_rng(4)
    ours, base = ([generator.normal(size=300).tolist()] for _ in range(2))
    tracemalloc.start()
    found = probability_of_improvement(ours, base)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert found.high - found.low == pytest.approx(2 * 1.96 / sqrt(6 * 300), rel=0.1)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (10, 3.164)])
def test_the_difference_is_that_of_the_printed_table(k, q):
    """Demsar 2006, Table 5 (a): critical values of the two-tailed Nemenyi test at 0.05."""
    generator = np.random.default_rng(k)
    blocks = [{str(j): float(v) for j, v in enumerate(generator.normal(size=k))} for _ in range(14)]
    found = critical_difference(blocks)
    assert found.difference == pytest.approx(q * (k * (k + 1) / (6 * 14)) ** 0.5, abs=2e-3)


@pytest.mark.parametrize("has_ties", [False, True])
def test_the_global_test_is_that_of_scipy(has_ties):
    values = np.random.default_rng(0).normal(size=(8, 4)) + 0.5 * np.arange(4)
    values = np.round(values) if has_ties else values
    found = critical_difference([dict(zip("abcd", row, strict=True)) for row in values.tolist()])
    assert found.p == pytest.approx(stats.friedmanchisquare(*values.T).pvalue, rel=1e-9)
    expected = stats.rankdata(-values, axis=1).mean(axis=0)
    assert dict(zip(found.labels, found.ranks, strict=True)) == pytest.approx(dict(zip("abcd", expected, strict=True)))
    assert list(found.ranks) == sorted(found.ranks)


def test_groups_and_profiles_by_hand():
    """Ten blocks, always a > b > c > d: CD = 2.569 sqrt(20 / 60) = 1.483, so that neighbours are joined, no more."""
    found = critical_difference([{"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}] * 10)
    assert found.difference == pytest.approx(1.483, abs=1e-3)
    assert found.groups == ((0, 1), (1, 2), (2, 3))
    assert found.p < 1e-5
    blocks = [{"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 3.0, "b": 2.0, "c": 1.0}]
    assert critical_difference(blocks).groups == ((0, 2),)
    # What floats make of 0.3 is a tie: no difference at all, p = 1.
    tie = critical_difference([{"a": 0.3, "b": 0.1 + 0.2}] * 3)
    assert (tie.p, tie.ranks) == (1.0, (1.5, 1.5))
    with pytest.raises(DataError, match="two blocks"):
        critical_difference([{"a": 1.0, "b": 2.0}, {"a": 1.0}])
    tasks = [{"a": [0.0, 10.0], "b": [5.0, 5.0]}, {"a": [100.0, 300.0], "b": [200.0, 300.0], "c": [150.0]}]
    found = performance_profile(tasks, places=5)
    # a: {0, 1} and {0, 1}; b: {0.5, 0.5} and {0.5, 1}; c lacks a task.
    assert found == {"a": [0.5, 0.5, 0.5, 0.5, 0.0], "b": [1.0, 1.0, 0.25, 0.25, 0.0]}
    assert performance_profile([{"a": [1.0], "b": [1.0]}], places=2) == {"a": [0.0, 0.0], "b": [0.0, 0.0]}


def test_false_alarms_are_no_more_than_the_level():
    """Methods without any difference: a pair is told apart in at most 5 % of suites, three standard errors allowed."""
    generator = np.random.default_rng(1)
    alarms = 0
    for _ in range(400):
        values = generator.normal(size=(12, 4)).tolist()
        found = critical_difference([dict(zip("abcd", row, strict=True)) for row in values])
        alarms += found.groups != ((0, 3),)
    assert alarms <= 400 * 0.05 + 3 * (400 * 0.05 * 0.95) ** 0.5
