"""The statistics against independent references: plain loops, other routines of scipy, simulation, printed figures."""

import json
import random
import time
import tracemalloc
from math import isfinite, isnan, nan, sqrt

import numpy as np
import pytest
from scipy import integrate, stats

from dipole.benchmarks import coverage
from dipole.benchmarks.report.ranking import critical_difference, performance_profile, rank_objectives
from dipole.benchmarks.statistics import Summary, aggregates, differences, summarize
from dipole.benchmarks.statistics.aggregates import iqm_interval, probability_of_improvement, relative_gain
from dipole.benchmarks.statistics.differences import difference, holm, of_pairs, of_summaries, paired, wilcoxon
from dipole.benchmarks.statistics.power import detectable, power, seeds_needed
from dipole.core.evaluation.intervals import interquartile_mean
from dipole.core.utils.errors import DataError
from tests.runs import refused

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
    refused(DataError, "non-empty", summarize, [])
    refused(DataError, "nan", summarize, [1.0, float("nan")])
    refused(DataError, "values by seed", differences.difference, [0.5, 0.6], [0.5, 0.7])
    refused(DataError, "got 1.0", iqm_interval, [1.0, 2.0])
    refused(DataError, "which is 0 on a task", relative_gain, [[1.0, 2.0]], [[-1.0, 1.0]])
    refused(DataError, "below 1, got 5", power, 1.0, 1.0, 5, 5.0)
    refused(DataError, "alpha .0.05. and below 1, got 80", detectable, 1.0, 5, 80.0)
    for function in (power, seeds_needed):
        refused(DataError, "0 or more, got -1", function, 1.0, -1.0, *[5] * (function is power))
    same = paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (same.p_t, same.p_wilcoxon, same.effect) == (1.0, 1.0, 0.0)
    shifted = paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 3.0, 2: 4.0})
    assert (shifted.difference, shifted.p_wilcoxon) == (1.0, 0.25)
    assert isnan(shifted.p_t)
    assert isnan(shifted.effect)


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


def test_welch_from_summaries_printed_values_and_three_seeds():
    """LMCL Table 5: over 6 tasks and 3 bases the smallest of 18 Welch p-values of X + DP against X is 0.60."""
    curl = [(413, 53, 423, 63), (680, 32, 682, 13), (908, 86, 926, 73), (298, 38, 296, 32), (621, 121, 625, 53)]
    curl.append((826, 42, 842, 27))
    x, y = [1.0, 4.0, 2.5, 3.0], [6.0, 2.0, 9.0]
    reference, found = stats.ttest_ind(x, y, equal_var=False), of_summaries(summarize(x), summarize(y))
    assert (found.p, found.df) == (pytest.approx(reference.pvalue), pytest.approx(reference.df))
    assert found.interval() == pytest.approx(tuple(reference.confidence_interval()))
    sides = [(Summary(3, d, sd, nan, nan), Summary(3, m, s, nan, nan)) for m, s, d, sd in curl]
    assert min(of_summaries(*both).p for both in sides) > 0.59
    generator = np.random.default_rng(0)
    ours, printed = generator.normal(size=(4000, 5)), generator.normal(size=4000)
    both = zip(ours, printed, strict=True)
    rejected = [differences.of_one_more_trial(summarize(row), value).p < 0.05 for row, value in both]
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
    refused(DataError, "same tasks", probability_of_improvement, ours, base[:2])
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
    assert abs(seeds_needed(842 - 826, differences.pooled_std(27, 42)) - 75) <= 3
    assert (seeds_needed(0.5, 1.0, limit=64), seeds_needed(0.5, 1.0, limit=63)) == (64, None)
    assert [seeds_needed(d, 1.0) for d in (0.0, float("nan"), 1e-6)] == [None] * 3
    assert seeds_needed(1.0, 0.0) == 2
    assert power(1.0, 1.0, 1) == 0.0
    assert isnan(power(nan, 1.0, 5))
    assert np.isnan(detectable(1.0, 1))
    assert detectable(0.0, 5) == 0
    found = [power(1.0, 1.0, n) for n in [*range(2, 120), 500, 1000, 2700, 100_000]]
    assert np.diff(found).min() > -1e-12
    assert max(found) == found[-1] == 1.0
    # SciPy answers nan for the other tail here, where the power is 1.
    for gap, n in ((0.6034, 1000), (1.61, 100), (20, 2), (38, 3), (1e6, 5)):
        assert power(gap, 1.0, n) == pytest.approx(1.0, abs=0.02)


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
    began = time.process_time()  # SciPy goes through 2^13 permutations for these, three seconds per cell of a report
    wilcoxon([1.0, 1.0, *range(2, 13)])
    assert time.process_time() - began < 0.1


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


@pytest.mark.parametrize(("ours", "base", "method"), [
    (range(20), range(20), "paired t"),
    (range(18, 38), range(20), "Welch"),  # 2 common seeds of 20
    (range(2), range(20), "Welch"), (range(8, 28), range(20), "paired t"),
    (range(9, 29), range(20), "Welch"), (range(3), range(3), "paired t"),
    (range(1, 4), range(3), "Welch"),
])  # fmt: skip
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
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    if method == "Welch":
        assert found.p_wilcoxon == pytest.approx(stats.mannwhitneyu(x, y).pvalue)
    # So does the mean of two comparisons. Each has 20 independent draws, or pairs of seeds that they share.
    assert differences.average([of_pairs(b, a)] * 2).p == pytest.approx(expected.pvalue, rel=1e-9)


def test_one_run_per_task_and_equal_gains_have_no_interval():
    found = iqm_interval([[1.0], [3.0]])
    assert (found.value, isnan(found.low)) == (2.0, True)
    beats = probability_of_improvement([[1.0], [3.0]], [[0.0], [4.0]])
    assert (beats.value, isnan(beats.high)) == (0.5, True)
    # One run of the base tells nothing of its spread, however many of ours beat it.
    assert isnan(probability_of_improvement([[1.0, 1.0]], [[0.0]]).low)
    for nothing in (iqm_interval, lambda tasks: probability_of_improvement(tasks, tasks)):
        refused(DataError, "at least", nothing, [])
    found = relative_gain([[2.0, 2.0, 2.0]], [[1.0, 1.0, 1.0]])
    assert (found.value, isnan(found.low)) == (1.0, True)
    assert "3 seeds gave the same" in found.needs
    assert "2 seeds give one" in iqm_interval([[1.0]]).needs
    # All runs win: no certainty.
    sure = probability_of_improvement([[2.0, 3.0, 4.0]], [[1.0, 0.0, -1.0]])
    assert sure.low < 0.5 < sure.high == 1.0


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


@pytest.mark.parametrize("has_ties", [False, True])
def test_the_global_test_is_that_of_scipy(has_ties):
    values = np.random.default_rng(0).normal(size=(8, 4)) + 0.5 * np.arange(4)
    values = np.round(values) if has_ties else values
    found = critical_difference([dict(zip("abcd", row, strict=True)) for row in values.tolist()])
    assert found.p == pytest.approx(stats.friedmanchisquare(*values.T).pvalue, rel=1e-9)
    expected = stats.rankdata(-values, axis=1).mean(axis=0)
    assert dict(zip(found.labels, found.ranks, strict=True)) == pytest.approx(dict(zip("abcd", expected, strict=True)))
    assert list(found.ranks) == sorted(found.ranks)


def test_critical_differences_groups_and_profiles_by_hand():
    """Ten blocks, always a > b > c > d: CD = 2.569 sqrt(20 / 60) = 1.483, so that neighbours are joined, no more."""
    # Demsar 2006, Table 5 (a): critical values of the two-tailed Nemenyi test at 0.05.
    for k, q in ((2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (10, 3.164)):
        blocks = [{str(j): float(j * i % 7) for j in range(k)} for i in range(14)]
        found = critical_difference(blocks)
        assert found.difference == pytest.approx(q * (k * (k + 1) / (6 * 14)) ** 0.5, abs=2e-3)
    found = critical_difference([{"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}] * 10)
    assert found.difference == pytest.approx(1.483, abs=1e-3)
    assert found.groups == ((0, 1), (1, 2), (2, 3))
    assert found.p < 1e-5
    blocks = [{"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 3.0, "b": 2.0, "c": 1.0}]
    assert critical_difference(blocks).groups == ((0, 2),)
    # A difference by the rounding of 0.3 is a tie: no difference at all, p = 1.
    tie = critical_difference([{"a": 0.3, "b": 0.1 + 0.2}] * 3)
    assert (tie.p, tie.ranks) == (1.0, (1.5, 1.5))
    refused(DataError, "two blocks", critical_difference, [{"a": 1.0, "b": 2.0}, {"a": 1.0}])
    tasks = [{"a": [0.0, 10.0], "b": [5.0, 5.0]}, {"a": [100.0, 300.0], "b": [200.0, 300.0], "c": [150.0]}]
    found = performance_profile(tasks, places=5)
    # a: {0, 1} and {0, 1}; b: {0.5, 0.5} and {0.5, 1}; c lacks a task.
    assert found == {"a": [0.5, 0.5, 0.5, 0.5, 0.0], "b": [1.0, 1.0, 0.25, 0.25, 0.0]}
    assert performance_profile([{"a": [1.0], "b": [1.0]}], places=2) == {"a": [0.0, 0.0], "b": [0.0, 0.0]}


def test_every_interval_holds_the_truth_as_often_as_it_says_and_alarms_are_rare():
    study = coverage.study(300)
    assert {line.distribution for line in study.lines} == set(coverage.DISTRIBUTIONS)
    assert {n for line in study.lines for n in line.holds} == {2, 3, 5, 10, 20}
    for line in study.lines:
        assert min(line.holds.values()) >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / 300), line
    for name, shares in study.alarms.items():  # a suite without effect decides something
        assert max(shares.values()) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300), name


def test_the_command_prints_what_the_study_counts(capsys):
    coverage.main(["--repeats", "20", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["repeats"], len(found["lines"])) == (20, len(coverage.INTERVALS) * len(coverage.DISTRIBUTIONS))
    refused(SystemExit, "2", coverage.main, ["--repeats", "0"])


def test_columns_of_the_same_runs_count_once():
    generator = np.random.default_rng(0)
    ours, base = generator.normal(11, 1, 4), generator.normal(10, 1, 4)
    for interval in (
        lambda tasks, **more: relative_gain([ours] * tasks, [base] * tasks, **more),
        lambda tasks, **more: iqm_interval([ours] * tasks, **more),
        lambda tasks, **more: probability_of_improvement([ours] * tasks, [base] * tasks, **more),
    ):
        alone, copied, apart = interval(1), interval(4, runs="aaaa"), interval(4, runs="abcd")
        assert (copied.value, copied.low, copied.high) == pytest.approx((alone.value, alone.low, alone.high))
        assert apart.high - apart.low < 0.8 * (alone.high - alone.low)
    one = {"base": dict(enumerate(base)), "ours": dict(enumerate(ours))}
    ranks = [rank_objectives(dict.fromkeys(tasks, one), "base", {}) for tasks in ("a", "abcd")]
    alone, copied = (next(rank for rank in each if rank.label == "ours") for each in ranks)
    for name in ("gain", "improvement"):  # reports pass on which columns have the same runs
        found, expected = getattr(copied, name), getattr(alone, name)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_the_gain_of_one_task_is_the_paired_t_interval_with_the_base_drawn_too():
    """Against the delta method written out: variance of x - (mean x / mean b) b over n and the mean of b squared."""
    x, b = {0: 3.1, 1: 2.8, 2: 3.9}, {2: 2.1, 0: 2.0, 1: 2.2}
    found = relative_gain([x], [b])
    one, other = [3.1, 2.8, 3.9], [2.0, 2.2, 2.1]
    level = sum(other) / 3
    ratio = sum(one) / sum(other)
    rest = [p - ratio * q for p, q in zip(one, other, strict=True)]
    half = stats.t.ppf(0.975, 2) * stats.sem(rest) / level
    assert found.value == pytest.approx(ratio - 1)
    assert (found.low, found.high) == pytest.approx((ratio - 1 - half, ratio - 1 + half))
    # Without common seeds each side has a spread of its own.
    assert isfinite(relative_gain([{0: 3.1, 1: 2.8}], [{2: 2.0, 3: 2.2}]).low)


def test_gains_that_differ_by_rounding_are_equal():
    """0.3 - 0.1 is 0.2 and 0.7 - 0.9 is -0.2, whatever floating point says: a tie, p = 1."""
    assert wilcoxon([0.3 - 0.1, 0.7 - 0.9]) == 1.0
    assert paired({0: 0.1, 1: 0.9, 2: 0.5}, {0: 0.3, 1: 0.7, 2: 0.5}).p_wilcoxon == 1.0
    # Records hold single precision: one image more of 100 for every seed is no spread.
    base, other = ({s: float(np.float32(0.42 + 0.07 * s + more)) for s in range(4)} for more in (0.0, 0.01))
    assert len({other[seed] - base[seed] for seed in base}) > 1
    assert (isnan(paired(base, other).p_t), paired(base, other).p_wilcoxon) == (True, 0.125)
    assert (difference(base, other).method, of_pairs(other, base).is_paired) == ("Welch", False)
    assert relative_gain([other], [base]).p > 0.05


def test_ranking_by_hand_with_tasks_and_means_that_are_missing_or_equal():
    a = {"base": {0: 1.0, 1: 2.0}, "x": {0: 3.0, 1: 4.01}}
    b = {"base": {0: 10.0, 1: 20.0}, "x": {0: 10.0, 1: 20.0}, "y": {0: 1.0, 1: 2.0}}
    cost = {"base": {0: -5.0, 1: -5.0}, "x": {0: -9.0, 1: -9.01}, "y": {0: -1.0, 1: -1.0}}
    tasks = {"A": {**a, "y": {0: 0.0, 1: 0.5}}, "B": b, "cost": cost}
    found = {r.label: r for r in rank_objectives(tasks, "base", {"x": [2.0, -4.0]})}
    assert found["x"].of_means == pytest.approx((1 + 1.5 + 3) / 3)
    assert found["base"].of_means == pytest.approx((2 + 1.5 + 2) / 3)
    assert found["x"].improvement.value == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["base"].improvement is None
    assert [(found[name].better, found[name].worse) for name in "xy"] == [(1, 1), (0, 0)]
    b = {"base": {0: 10.0, 1: 20.0}, "x": {0: 11.0, 1: 20.0}}
    found = rank_objectives({"A": {**a, "best of one": {0: 9.0, 1: 9.5}}, "B": b}, "base", {})
    assert [rank.label for rank in found] == ["x", "base", "best of one"]
    assert [rank.of_means for rank in found[:2]] == [1.0, 2.0]  # it is in nobody's way, either
    assert isnan(found[2].of_means)
    assert (found[2].missing, found[2].gain, found[2].improvement) == (("B",), None, None)
    tasks = {"A": {"x": {0: 0.1, 1: 0.2, 2: 0.3}, "y": {0: 0.3, 1: 0.2, 2: 0.1 + 1e-17}, "z": {0: 0.2 + 3e-17}}}
    assert {rank.of_means for rank in rank_objectives(tasks, None, {})} == {2.0}
    generator = np.random.default_rng(2)
    x, b = generator.normal(5, 1, (2, 6)), generator.normal(4, 1, (2, 6))
    x[1, 5:] = nan
    found = aggregates.relative_gains(x, b, ("a", "b"))
    alone = [aggregates.relative_gains(*(s[t : t + 1, : 6 - t] for s in (x, b)), ("a",)) for t in range(2)]
    assert found.value == pytest.approx(np.mean([each.value for each in alone]))
    assert found.error**2 == pytest.approx(sum(each.error**2 for each in alone) / 4)


def test_pairs_that_all_differ_by_the_same_are_judged_by_the_sides():
    """No narrow interval of the gain either, whose unit, the base's mean, is drawn too."""
    base = {0: 79.0, 1: 81.0, 2: 80.5, 3: 78.5}
    ours = {seed: value + 1 for seed, value in base.items()}
    found = difference(base, ours)
    reference = stats.ttest_ind(list(ours.values()), list(base.values()), equal_var=False)
    assert (found.method, found.difference, found.p_t) == ("Welch", 1.0, pytest.approx(reference.pvalue))
    assert (found.low, found.high) == pytest.approx(reference.confidence_interval())
    gain = relative_gain([ours], [base])
    assert gain.low < 0 < gain.value < gain.high
    assert gain.p > 0.05
    # Nothing tells a spread where the sides have none.
    assert isnan(difference(dict.fromkeys(base, 1.0), dict.fromkeys(base, 2.0)).low)
    assert relative_gain([base], [base]).value == 0.0
