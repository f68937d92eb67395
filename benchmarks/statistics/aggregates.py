"""Averages over several tasks with intervals: interquartile mean, probability of improvement, relative gain.

Their formulas work on arrays (T, S): tasks, and seeds of each, or nan if a task has no such run. `runs` names for each
task whose runs it measures: the columns of the same runs have one name, and a seed of them is one draw, not several. A
draw's contribution is summed over its columns before variances are added.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan, sqrt
from statistics import fmean
from typing import Any

import numpy as np
from scipy import special

from dipole.benchmarks.statistics.differences import CONFIDENCE, NEEDED, NOISE, Estimate, pairs_are_better
from dipole.core.evaluation.intervals import Array, as_sample
from dipole.core.utils.errors import DataError

Runs = Mapping[int, float] | Sequence[float] | Array
"""The values of a task: by seed, or in an order that all tasks share."""
TRIMMED_FROM = 8
"""Tasks from which on the mean gain is trimmed. Of four it would be the mean of two."""
MIDDLE_HALF = 1.4
"""Variance of the middle half's mean over that of the mean: 1.19 for normal values, and a margin for few."""
PRIOR_SEEDS = 15
"""Weight, in seeds, of the upper bound in the variance of the probability of improvement."""


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
    found = interquartile_means(values, _names(runs, len(tasks)))
    return _interval(found.value, found.interval(), values)


def probability_of_improvement(
    ours: Sequence[Runs], base: Sequence[Runs], runs: Sequence[Hashable] | None = None
) -> Interval:
    """Return P(a run of ours beats a run of base), ties half, averaged over tasks (Agarwal et al. 2021).

    The interval is binomial, with the number of trials of `probabilities_of_improvement`.

    Args:
        ours: T tasks, the values of each by seed, or (S,) in an order that all share.
        base: of the same tasks, likewise, (S,) each.
        runs: as of `iqm_interval`.

    Raises:
        DataError: as `iqm_interval`, or the two have another number of tasks.
    """
    x, b = _both(ours, base, "probability of improvement")
    value, trials = probabilities_of_improvement(x, b, _names(runs, len(ours)))
    return _interval(value, binomial_bounds(value, trials), x, b)


def relative_gain(ours: Sequence[Runs], base: Sequence[Runs], runs: Sequence[Hashable] | None = None) -> Interval:
    """Return the gain over the base in units of its mean, averaged over tasks, with a t-interval.

    From eight tasks on the mean is trimmed: a quarter of the tasks is cut at each end.

    Common seeds are treated as pairs (see `relative_gains`).

    Args:
        ours: T tasks, the values of each by seed, or (S,) in an order that all share.
        base: of the same tasks, likewise, (S,) each.
        runs: as of `iqm_interval`.

    Raises:
        DataError: as `probability_of_improvement`, or the base's mean of a task is 0.
    """
    x, b = _both(ours, base, "a gain")
    if not all(fmean(task[~np.isnan(task)]) for task in b):
        raise DataError("a gain is in units of the base's mean, which is 0 on a task.")
    found = relative_gains(x, b, _names(runs, len(ours)))
    p = nan
    if isfinite(found.error):
        p = found.p
    return replace(_interval(found.value, found.interval(), x, b), p=p)


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
        if not hasattr(task, "__len__"):
            raise DataError(f"a task is a list of its values, or values by seed, got {task!r}.")
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


def _interval(value: float, bounds: tuple[float, float], *samples: Array) -> Interval:
    (low, high), needs = bounds, ""
    if not isfinite(low):
        low = high = nan
        seeds = min(int((~np.isnan(each)).sum(axis=-1).min()) for each in samples)
        needs = f"no interval: {NEEDED} seeds give one"
        if seeds >= NEEDED:
            needs = f"no interval: {seeds} seeds gave the same, more may differ"
    return Interval(value, low, high, needs)


def relative_gains(ours: Array, base: Array, runs: Sequence[Hashable]) -> Estimate:
    """Gain over the base in units of its mean, g_t = (x_t - b_t) / |b_t|: mean over tasks.

    Of T >= 8 tasks floor(T / 4) are cut at each end. A seed that both have is one draw of both (paired). Where
    `pairs_are_better` denies it, ours and those of the base are drawn apart (Welch). The base's mean is drawn too: to
    first order a pair adds (x - mean x - rho_t (b - mean b)) / (n |b_t|) to g_t, with rho_t = x_t / b_t. If all pairs
    of a task have the same difference, they show no spread, and the sides are drawn apart too.
    """
    found = _relative_gains(ours, base, runs, True)
    for x, b in zip(ours, base, strict=True):
        both = _present(x + b)
        if both.sum() >= NEEDED and np.ptp((x - b)[both]) <= NOISE * np.abs([x[both], b[both]]).max():
            found = _relative_gains(ours, base, runs, False)
            break
    if abs(found.value) <= NOISE:
        return replace(found, value=0.0)
    return found


def _relative_gains(ours: Array, base: Array, runs: Sequence[Hashable], is_paired: bool) -> Estimate:
    count = len(ours)
    gains, errors = [], []
    for x, b, name in zip(ours, base, runs, strict=True):
        of_ours, of_base = _against(x, b, name, is_paired)
        level = abs(of_base.mean)
        gains.append((of_ours.mean - of_base.mean) / level)
        errors.append((of_ours.times(1 / level), of_base.times(-of_ours.mean / (of_base.mean * level))))
    cut = count // 4 if count >= TRIMMED_FROM else 0
    place = np.argsort(np.argsort(gains))
    share = ((place >= cut) & (place < count - cut)) / (count - 2 * cut)
    parts = [part.times(weight) for weight, each in zip(share.tolist(), errors, strict=True) for part in each]
    variance, df = _variance(parts, 1.0 + max(map(abs, gains)))
    return Estimate(float((np.array(gains) * share).sum()), sqrt(variance) or nan, df)


def interquartile_means(values: Array, runs: Sequence[Hashable]) -> Estimate:
    """Mean of the middle half of all runs of all tasks (Agarwal et al. 2021), floor(N / 4) of N cut at each end.

    Its variance is that of winsorized values (Tukey and McLaughlin 1963), summed over what is drawn together, and no
    less than `MIDDLE_HALF` times that of the mean: cut values tell little of the spread if there are few.
    """
    ordered = np.sort(values[_present(values)])
    count = len(ordered)
    cut = count // 4
    left = count - 2 * cut
    bounded, scale = np.clip(values, ordered[cut], ordered[count - cut - 1]), np.abs(ordered).max()
    found = []
    for each, over in ((bounded, left), (values, count)):
        parts = [_contribution(name, row) for row, name in zip(each, runs, strict=True)]
        found.append(_variance([part.times(part.count / over) for part in parts], scale))
    (variance, df), (whole, of_whole) = found
    if MIDDLE_HALF * whole > variance:
        variance, df = MIDDLE_HALF * whole, of_whole
    return Estimate(float(ordered[cut : count - cut].mean()), sqrt(variance) or nan, df)


def probabilities_of_improvement(ours: Array, base: Array, runs: Sequence[Hashable]) -> tuple[float, float]:
    """P(a run of ours beats a run of base), ties half, averaged over tasks, and how many trials it is worth.

    A probability p from n runs a side has a variance of at most p (1 - p) / n, whatever the runs are drawn from (van
    Dantzig 1951), and columns of the same runs are no further trials. From many runs the variance is known better, by
    how often each of them wins (DeLong et al. 1988): it counts n - 1 to `PRIOR_SEEDS` of the bound.
    """
    shares, parts, fewest = [], [], dict[Hashable, int]()
    for x, b, name in zip(ours, base, runs, strict=True):
        beats = (x[:, None] > b) + 0.5 * (x[:, None] == b)
        beats = np.where(_present(x[:, None] + b), beats, np.nan)  # (S, S)
        of_ours, of_base = np.nansum(beats, axis=1) / _present(b).sum(), np.nansum(beats, axis=0) / _present(x).sum()
        shares.append(of_ours.sum() / _present(x).sum())
        for side, won, values in (("ours", of_ours, x), ("base", of_base, b)):
            won = np.where(_present(values), won, np.nan)
            parts.append(_contribution((side, name), won).times(1 / len(ours)))
            fewest[name] = min(fewest.get(name, len(won)), int(_present(values).sum()))
    value = float(np.mean(shares))
    if min(fewest.values()) < NEEDED:
        return value, nan
    bound = min(count * len(ours) / list(runs).count(name) for name, count in fewest.items())
    hedged = (value * bound + 0.5) / (bound + 1)  # all wins are no certainty
    most = hedged * (1 - hedged) / bound
    variance = ((bound - 1) * _variance(parts)[0] + PRIOR_SEEDS * most) / (bound - 1 + PRIOR_SEEDS)
    return value, bound * most / variance


def binomial_bounds(share: float, trials: float) -> tuple[float, float]:
    """Interval of a share of trials, of any number (Clopper and Pearson 1934): never of width 0, inside [0, 1]."""
    won, lost, tail = share * trials, (1 - share) * trials, (1 - CONFIDENCE) / 2
    low, high = won, 1 - lost  # nan without trials
    if won > 0:
        low = float(special.betaincinv(won, lost + 1, tail))
    if lost > 0:
        high = float(special.betainccinv(won + 1, lost, tail))
    return low, high


def _present(values: Array) -> Any:
    return ~np.isnan(values)


@dataclass(frozen=True)
class _Contribution:
    """A mean, what each draw of a name adds to its error, (S,), 0 where missing, and the number of draws."""

    name: Hashable
    mean: float
    error: Array
    count: int

    def times(self, factor: float) -> "_Contribution":
        """Return the contribution to a multiple of the mean."""
        return replace(self, mean=self.mean * factor, error=self.error * factor)


def _contribution(name: Hashable, values: Array) -> _Contribution:
    """Return the contributions of the runs in values (S,)."""
    count = int(_present(values).sum())
    mean = np.nansum(values) / count
    return _Contribution(name, mean, np.nan_to_num((values - mean) / count), count)


def _against(ours: Array, base: Array, name: Hashable, is_paired: bool) -> tuple[_Contribution, _Contribution]:
    """Return both sides of one task. Draws of pairs have one name, if `pairs_are_better` on the common seeds."""
    both = _present(ours + base)
    if is_paired and pairs_are_better(*(int(each.sum()) for each in (both, _present(ours), _present(base)))):
        pairs = ("pairs", name)
        return _contribution(pairs, np.where(both, ours, np.nan)), _contribution(pairs, np.where(both, base, np.nan))
    return _contribution(("ours", name), ours), _contribution(("base", name), base)


def _variance(parts: Sequence[_Contribution], scale: float = 1.0) -> tuple[float, float]:
    """Return the variance that the draws give a sum, and its degrees of freedom (Satterthwaite 1946 over their names).

    Draws of one name and seed are summed first. Rounding at the size of the values, `scale`, is no spread.
    """
    together: dict[Hashable, list[_Contribution]] = {}
    for part in parts:
        together.setdefault(part.name, []).append(part)
    variance, spread = 0.0, 0.0
    for each in together.values():
        count = max(part.count for part in each)
        if count < NEEDED:
            return nan, nan
        own = float(count / (count - 1) * (np.sum([part.error for part in each], axis=0) ** 2).sum())
        if own > (NOISE * scale) ** 2:
            variance, spread = variance + own, spread + own**2 / (count - 1)
    return variance, variance**2 / spread if spread else nan
