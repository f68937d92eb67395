"""Bootstrap intervals against plain loops, scipy's trimmed mean and the truth that they are to cover."""

from math import isnan

import numpy as np
import pytest
from scipy import stats

from dipole.core.evaluation.intervals import bootstrap_interval, interquartile_mean
from dipole.core.utils.errors import ConfigError, DataError


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 101])
def test_the_interquartile_mean_is_the_trimmed_one(n):
    values = np.random.default_rng(n).normal(size=n)
    assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25), rel=1e-14)


def test_the_interval_is_that_of_scipys_bootstrap():
    values = np.random.default_rng(0).exponential(size=30)
    low, high = bootstrap_interval(values, "mean", confidence=0.9)
    theirs = stats.bootstrap((values,), np.mean, confidence_level=0.9, method="percentile", random_state=1)
    assert low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert high == pytest.approx(theirs.confidence_interval.high, abs=0.02)
    assert bootstrap_interval(values, lambda drawn: np.median(drawn, axis=1)) != (low, high)


def test_several_samples_are_redrawn_each_by_itself():
    """Levels 0 and 10 of equal size: the mean varies by the spread inside the samples alone."""
    generator = np.random.default_rng(1)
    samples = [generator.normal(level, 0.1, size=20).tolist() for level in (0, 10)]
    low, high = bootstrap_interval(samples)
    assert 0 < high - low < 0.1
    assert bootstrap_interval(samples) == (low, high)
    assert bootstrap_interval(samples, seed=1) != (low, high)
    together_low, together_high = bootstrap_interval([*samples[0], *samples[1]])
    assert together_high - together_low > 2


def test_normal_samples_are_covered_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    intervals = [bootstrap_interval(generator.normal(size=40), draws=400, seed=i) for i in range(200)]
    assert 0.88 <= np.mean([low <= 0 <= high for low, high in intervals]) <= 0.99


def test_samples_without_an_interval_and_wrong_settings():
    assert all(map(isnan, bootstrap_interval([3.0])))
    assert all(map(isnan, bootstrap_interval([[3.0], [4.0]], "iqm")))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        bootstrap_interval([1.0, 2.0], confidence=95)
    with pytest.raises(ConfigError, match="mean, iqm"):
        bootstrap_interval([1.0, 2.0], "median")


@pytest.mark.parametrize("wrong", [[], [1.0, float("nan")], ["a"], [[1.0], []], [[[1.0, 2.0]]]])
def test_what_is_no_sample_is_refused(wrong):
    with pytest.raises(DataError, match="finite numbers"):
        bootstrap_interval(wrong)
