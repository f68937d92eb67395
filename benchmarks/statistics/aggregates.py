"""Averages over several tasks with intervals: interquartile mean, probability of improvement, relative gain."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

import numpy as np

from dipole.benchmarks.statistics import estimates
from dipole.benchmarks.statistics.differences import NEEDED
from dipole.core.evaluation.intervals import Array, as_sample
from dipole.core.utils.errors import DataError

Runs = Mapping[int, float] | Sequence[float] | Array
"""The values of a task: by seed, or in an order that all tasks share."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Args:
        value: the estimate.
        low: lower end, or nan if there is no interval.
        high: upper end.
        needs: if there is no interval, what would give one. Else "".
        p: two-sided p-value of no gain (`relative_gain`), nan for other estimates.
    """

    value: float
    low: float
    high: float
    needs: str = ""
    p: float = nan


def iqm_interval(tasks: Sequence[Runs], runs: Sequence[Hashable] | None = None) -> Interval:
    """Return the interquartile mean of all runs of all tasks with a t-interval from winsorized values.

    Args:
        tasks: T tasks, the values of each by seed, or (S,) in an order that all share.
        runs: a name for each task. Tasks of one name were measured on the same runs. Default: all were.

    Raises:
        DataError: no task, a task without values, a value that is not finite, or another number of names.
    """
    values = _array(tasks)
    found = estimates.interquartile_means(values, _names(runs, len(tasks)))
    return _interval(found.value, found.bounds(), values)


def probability_of_improvement(
    ours: Sequence[Runs], base: Sequence[Runs], runs: Sequence[Hashable] | None = None
) -> Interval:
    """Return P(a run of ours beats a run of base), ties half, averaged over tasks (Agarwal et al. 2021).

    The interval is binomial, with the number of trials of `estimates.probabilities_of_improvement`.

    Args:
        ours: T tasks, the values of each by seed, or (S,) in an order that all share.
        base: of the same tasks, likewise, (S,) each.
        runs: as of `iqm_interval`.

    Raises:
        DataError: as `iqm_interval`, or the two have another number of tasks.
    """
    x, b = _both(ours, base, "probability of improvement")
    value, trials = estimates.probabilities_of_improvement(x, b, _names(runs, len(ours)))
    return _interval(value, estimates.binomial_bounds(value, trials), x, b)


def relative_gain(ours: Sequence[Runs], base: Sequence[Runs], runs: Sequence[Hashable] | None = None) -> Interval:
    """Return the gain over the base in units of its mean, averaged over tasks, with a t-interval.

    From eight tasks on the mean is trimmed: a quarter of the tasks is cut at each end.

    Common seeds are treated as pairs (see `estimates.relative_gains`).

    Args:
        ours: T tasks, the values of each by seed, or (S,) in an order that all share.
        base: of the same tasks, likewise, (S,) each.
        runs: as of `iqm_interval`.

    Raises:
        DataError: as `probability_of_improvement`.
    """
    x, b = _both(ours, base, "a gain")
    found = estimates.relative_gains(x, b, _names(runs, len(ours)))
    return replace(_interval(found.value, found.bounds(), x, b), p=float(found.p_values()))


def _both(ours: Sequence[Runs], base: Sequence[Runs], what: str) -> tuple[Array, Array]:
    if len(ours) != len(base):
        raise DataError(f"{what} compares the same tasks, got {len(ours)} and {len(base)}")
    together = _array([*ours, *base])
    return together[: len(ours)], together[len(ours) :]


def _array(tasks: Sequence[Runs]) -> Array:
    """Return the values (T, S) by seed, nan where a task has no run of a seed."""
    if not len(tasks):
        raise DataError("an average over tasks needs at least one task, got none.")
    by_seed: list[dict[Any, float]] = []
    for task in tasks:
        if not isinstance(task, Mapping):
            task = dict(enumerate(task))
        by_seed.append(dict(zip(task, as_sample(list(task.values())).tolist(), strict=True)))
    seeds = sorted({seed for task in by_seed for seed in task})
    return np.array([[task.get(seed, nan) for seed in seeds] for task in by_seed])


def _names(runs: Sequence[Hashable] | None, count: int) -> Sequence[Hashable]:
    if runs is None:
        return [None] * count
    if len(runs) != count:
        raise DataError(f"runs names {len(runs)} tasks, and there are {count}.")
    return runs


def _interval(value: Array, bounds: tuple[Array, Array], *samples: Array) -> Interval:
    low, high, needs = float(bounds[0]), float(bounds[1]), ""
    if not isfinite(low):
        low = high = nan
        seeds = min(int((~np.isnan(each)).sum(axis=-1).min()) for each in samples)
        needs = f"no interval: {NEEDED} seeds give one"
        if seeds >= NEEDED:
            needs = f"no interval: {seeds} seeds gave the same, more may differ"
    return Interval(float(value), low, high, needs)
