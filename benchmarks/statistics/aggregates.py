"""Several measurements summed up: interquartile mean, probability of improvement and relative gain, with intervals."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

import numpy as np

from dipole.benchmarks.statistics import estimates
from dipole.benchmarks.statistics.differences import CONFIDENCE
from dipole.core.evaluation.intervals import Array, as_sample, as_samples, interquartile_mean
from dipole.core.utils.errors import DataError

Runs = Mapping[int, float] | Sequence[float] | Array
"""The values of a task by seed, or in an order that all of its columns share."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Args:
        value: the estimate.
        low: lower end, or nan if there is no interval.
        high: upper end.
        level: share of such intervals that hold the truth, in (0, 1).
        method: how it was made.
        needs: what would give an interval, if there is none, or "".
        p: two-sided, of no gain, for `relative_gain`, nan for other estimates.
    """

    value: float
    low: float
    high: float
    level: float = CONFIDENCE
    method: str = ""
    needs: str = ""
    p: float = nan


def iqm(scores: Sequence[Sequence[float]] | Sequence[Array] | Array) -> float:
    """Interquartile mean of all runs of all tasks together: the mean of the middle half (Agarwal et al. 2021).

    Args:
        scores: of each task, (S,) values.

    Raises:
        DataError: there are no values, or one is not finite.
    """
    return interquartile_mean(np.concatenate(as_samples(scores)))


def iqm_interval(
    tasks: Sequence[Runs],
    confidence: float = CONFIDENCE,
    *,
    runs: Sequence[Hashable] | None = None,
) -> Interval:
    """Interquartile mean of all runs of all tasks with a t-interval from winsorized values.

    Args:
        tasks: T of them, the values of each by seed, or (S,) in an order that all share.
        confidence: of the interval, in (0, 1).
        runs: a name for each task. Those of one name are columns of the same runs, which is what all are taken for
            if nothing is said.

    Raises:
        DataError: there is no task, a task without values or with one that is not finite, or another number of names.
    """
    values = _array(tasks)
    if not len(values):
        raise DataError("an average over tasks needs at least one task, got none.")
    found = estimates.interquartile_means(values, _names(runs, len(tasks)))
    return _interval(found.value, found.bounds(confidence), confidence, "winsorized t", _fewest(values))


def probability_of_improvement(
    ours: Sequence[Runs],
    base: Sequence[Runs],
    confidence: float = CONFIDENCE,
    *,
    runs: Sequence[Hashable] | None = None,
) -> Interval:
    """P(a run of ours beats a run of base), ties half, averaged over tasks, with an interval (Agarwal et al. 2021).

    The interval is binomial, of as many trials as the runs are worth (`estimates.probabilities_of_improvement`).

    Args:
        ours: T tasks, the values of each by seed, or (S,) in an order that all share.
        base: of the same tasks, likewise, (S,) each.
        confidence: of the interval, in (0, 1).
        runs: as of `iqm_interval`.

    Raises:
        DataError: as `iqm_interval`, or the two have another number of tasks.
    """
    x, b = _both(ours, base, "probability of improvement")
    value, trials = estimates.probabilities_of_improvement(x, b, _names(runs, len(ours)))
    bounds = estimates.binomial_bounds(value, trials, confidence)
    return _interval(value, bounds, confidence, "binomial", min(_fewest(x), _fewest(b)))


def relative_gain(
    ours: Sequence[Runs],
    base: Sequence[Runs],
    confidence: float = CONFIDENCE,
    *,
    runs: Sequence[Hashable] | None = None,
) -> Interval:
    """Gain over the base in units of its mean, averaged over the middle tasks, with a t-interval.

    Seeds that both have are drawn as pairs, with all their columns (see `estimates.relative_gains`).

    Args:
        ours: T tasks, the values of each by seed, or (S,) in an order that all share.
        base: of the same tasks, likewise, (S,) each.
        confidence: of the interval, in (0, 1).
        runs: as of `iqm_interval`.

    Raises:
        DataError: as `probability_of_improvement`.
    """
    x, b = _both(ours, base, "a gain")
    found = estimates.relative_gains(x, b, _names(runs, len(ours)))
    gain = _interval(found.value, found.bounds(confidence), confidence, "paired t", min(_fewest(x), _fewest(b)))
    return replace(gain, p=float(found.p_values()))


def _both(ours: Sequence[Runs], base: Sequence[Runs], what: str) -> tuple[Array, Array]:
    if len(ours) != len(base):
        raise DataError(f"{what} compares the same tasks, got {len(ours)} and {len(base)}")
    together = _array([*ours, *base])
    return together[: len(ours)], together[len(ours) :]


def _array(tasks: Sequence[Runs]) -> Array:
    """Values (T, S) by seed, nan where a task has none of a seed."""
    if not len(tasks):
        raise DataError("an average over tasks needs at least one task, got none.")
    by_seed: list[dict[Any, float]] = []
    for task in tasks:
        seeds = list(task) if isinstance(task, Mapping) else range(len(task))
        values = as_sample(list(task.values()) if isinstance(task, Mapping) else task)
        by_seed.append(dict(zip(seeds, values.tolist(), strict=True)))
    seeds = sorted({seed for task in by_seed for seed in task})
    return np.array([[task.get(seed, nan) for seed in seeds] for task in by_seed])


def _names(runs: Sequence[Hashable] | None, count: int) -> Sequence[Hashable]:
    if runs is None:
        return [None] * count
    if len(runs) != count:
        raise DataError(f"runs names those of {len(runs)} tasks, and there are {count}.")
    return runs


def _fewest(values: Array) -> int:
    return int((~np.isnan(values)).sum(axis=-1).min())


def _interval(value: Array, bounds: tuple[Array, Array], confidence: float, method: str, fewest: int) -> Interval:
    low, high = float(bounds[0]), float(bounds[1])
    if isfinite(low):
        return Interval(float(value), low, high, confidence, method)
    return Interval(float(value), nan, nan, confidence, "", needs(fewest))


def needs(seeds: int) -> str:
    """Return what would give an interval, if so many seeds have none."""
    if seeds < estimates.NEEDED:
        return f"no interval: {estimates.NEEDED} seeds give one"
    return f"no interval: {seeds} seeds gave the same, more may differ"
