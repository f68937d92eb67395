"""What intervals and tests hold, by simulation; and that what is drawn together is counted once."""

import json
from math import isfinite, isnan, nan

import numpy as np
import pytest
from scipy import stats

from dipole.benchmarks import coverage
from dipole.benchmarks.report.ranking import rank_objectives
from dipole.benchmarks.statistics import (
    difference,
    estimates,
    iqm_interval,
    paired,
    probability_of_improvement,
    relative_gain,
    wilcoxon,
)


@pytest.fixture(scope="module")
def study():
    return coverage.study(1000)


def test_every_interval_holds_the_truth_as_often_as_it_says(study):
    assert {line.distribution for line in study.lines} == set(coverage.DISTRIBUTIONS)
    short = [
        (line.what, line.distribution, n, share)
        for line in study.lines
        for n, share in line.holds.items()
        if share < 0.93 - 3 * np.sqrt(0.93 * 0.07 / 1000)
    ]
    assert short == []
    assert {n for line in study.lines for n in line.holds} == {2, 3, 5, 10, 20}


def test_a_suite_without_effect_decides_something_in_one_case_of_twenty_at_most(study):
    for name, shares in study.alarms.items():
        assert max(shares.values()) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000), name


def test_the_command_prints_what_the_study_counts(capsys):
    coverage.main(["--repeats", "200", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["repeats"] == 200
    assert len(found["lines"]) == len(coverage.INTERVALS) * len(coverage.DISTRIBUTIONS)
    with pytest.raises(SystemExit) as ended:
        coverage.main(["--repeats", "3"])
    assert ended.value.code == 2
    assert "at least 100" in capsys.readouterr().err


def suite_without_effect(generator, seeds, rows=5, columns=4):
    """Columns of the same runs: nine tenths of what varies is the run's."""
    runs = generator.normal(size=(rows + 1, 1, seeds))
    values = 20 + 0.95 * runs + 0.3 * generator.normal(size=(rows + 1, columns, seeds))
    return {
        f"column {c}": {("base" if r == 0 else f"row {r}"): dict(enumerate(values[r, c])) for r in range(rows + 1)}
        for c in range(columns)
    }


def test_a_ranking_without_effect_raises_no_more_alarms_than_it_may():
    """By the function that reports call, on whole suites: gains and probabilities of improvement."""
    generator = np.random.default_rng(3)
    repeats, gains, better = 50, 0, 0
    for _ in range(repeats):
        ranks = [rank for rank in rank_objectives(suite_without_effect(generator, 3), "base", {}) if rank.gain]
        gains += not ranks[0].gain.low <= 0 <= ranks[0].gain.high
        better += not ranks[0].improvement.low <= 0.5 <= ranks[0].improvement.high
    most = stats.binom.ppf(0.999, repeats, 0.05)
    assert gains <= most
    assert better <= most


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
    wide = relative_gain([{0: 3.1, 1: 2.8}], [{2: 2.0, 3: 2.2}])
    assert isfinite(wide.low)


def test_without_common_seeds_the_test_is_that_of_welch():
    x, b = {0: 1.0, 1: 4.0, 2: 2.5}, {10: 6.0, 11: 2.0, 12: 9.0, 13: 7.0}
    found = difference(b, x)
    reference = stats.ttest_ind(list(x.values()), list(b.values()), equal_var=False)
    low, high = reference.confidence_interval()
    assert (found.method, found.n) == ("Welch", 3)
    assert (found.p_t, found.low, found.high) == pytest.approx((reference.pvalue, low, high))
    assert found.p_wilcoxon == pytest.approx(stats.mannwhitneyu(list(x.values()), list(b.values())).pvalue)


def test_equal_gains_have_no_interval_and_say_why():
    shifted = paired({0: 0.1, 1: 0.7}, {0: 0.3, 1: 0.9})
    assert isnan(shifted.low)
    assert isnan(paired({0: 0.1, 1: 0.7}, {0: 0.1, 1: 0.7}).high)
    found = relative_gain([[2.0, 2.0, 2.0]], [[1.0, 1.0, 1.0]])
    assert (found.value, isnan(found.low)) == (1.0, True)
    assert "3 seeds gave the same" in found.needs
    assert "2 seeds give one" in iqm_interval([[1.0]]).needs
    # All runs win: no certainty.
    sure = probability_of_improvement([[2.0, 3.0, 4.0]], [[1.0, 0.0, -1.0]])
    assert sure.low < 0.5 < sure.high == 1.0


def test_gains_are_rounded_to_the_metrics_resolution_before_they_are_ranked():
    """0.3 - 0.1 is 0.2 and 0.7 - 0.9 is -0.2, whatever floating point says: a tie, p = 1."""
    gains = [0.3 - 0.1, 0.7 - 0.9]
    assert abs(gains[0]) != abs(gains[1])
    assert wilcoxon(gains) == 1.0
    base, other = {0: 0.1, 1: 0.9, 2: 0.5}, {0: 0.3, 1: 0.7, 2: 0.5}
    assert paired(base, other).p_wilcoxon == 1.0
    # In steps of 0.01 these are 1, 1, 1 and -1; unrounded the loss would have a rank of its own.
    base, other = dict.fromkeys(range(4), 0.5), {0: 0.511, 1: 0.512, 2: 0.509, 3: 0.4887}
    assert paired(base, other, resolution=0.01).p_wilcoxon == pytest.approx(stats.wilcoxon([1, 1, 1, -1]).pvalue)
    assert paired(base, other).p_wilcoxon == pytest.approx(stats.wilcoxon([0.011, 0.012, 0.009, -0.0113]).pvalue)
    assert isnan(paired({0: 0.5, 1: 0.6}, {0: 0.5101, 1: 0.6099}, resolution=0.01).low)


def test_tasks_and_means_that_are_missing_or_equal():
    tasks = {
        "A": {"base": {0: 1.0, 1: 2.0}, "x": {0: 3.0, 1: 4.01}, "best of one": {0: 9.0, 1: 9.5}},
        "B": {"base": {0: 10.0, 1: 20.0}, "x": {0: 11.0, 1: 20.0}},
    }
    found = rank_objectives(tasks, "base", {})
    assert [rank.label for rank in found] == ["x", "base", "best of one"]
    assert [rank.of_means for rank in found[:2]] == [1.0, 2.0]  # it is in nobody's way, either
    assert isnan(found[2].of_means)
    assert (found[2].missing, found[2].gain, found[2].improvement) == (("B",), None, None)
    tasks = {"A": {"x": {0: 0.1, 1: 0.2, 2: 0.3}, "y": {0: 0.3, 1: 0.2, 2: 0.1 + 1e-17}, "z": {0: 0.2 + 3e-17}}}
    assert {rank.of_means for rank in rank_objectives(tasks, None, {})} == {2.0}
    generator = np.random.default_rng(2)
    x, b = generator.normal(5, 1, (2, 6)), generator.normal(4, 1, (2, 6))
    x[1, 5:] = nan
    found = estimates.relative_gains(x, b, ("a", "b"))
    alone = [estimates.relative_gains(*(s[t : t + 1, : 6 - t] for s in (x, b)), ("a",)) for t in range(2)]
    assert found.value == pytest.approx(np.mean([each.value for each in alone]))
    assert found.variance == pytest.approx(sum(each.variance for each in alone) / 4)


def test_pairs_that_all_differ_by_the_same_are_judged_by_the_sides():
    """No narrow interval of the gain either, whose unit, the base's mean, is drawn too."""
    base = {0: 79.0, 1: 81.0, 2: 80.5, 3: 78.5}
    ours = {seed: value + 1 for seed, value in base.items()}
    found = difference(base, ours)
    reference = stats.ttest_ind(list(ours.values()), list(base.values()), equal_var=False)
    assert (found.method, found.difference) == ("Welch", 1.0)
    assert found.p_t == pytest.approx(reference.pvalue)
    assert (found.low, found.high) == pytest.approx(reference.confidence_interval())
    gain = relative_gain([ours], [base])
    assert gain.low < 0 < gain.value < gain.high
    assert gain.p > 0.05
    # Nothing tells a spread where the sides have none.
    assert isnan(difference(dict.fromkeys(base, 1.0), dict.fromkeys(base, 2.0)).low)
    assert relative_gain([base], [base]).value == 0.0
