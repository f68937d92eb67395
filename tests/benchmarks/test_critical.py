"""Critical differences and performance profiles against scipy, a printed table and numbers worked out by hand."""

import numpy as np
import pytest
from scipy import stats

from dipole.benchmarks.critical import critical_difference, performance_profile
from dipole.core.utils.errors import DataError


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
