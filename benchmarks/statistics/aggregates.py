"""Averages over several tasks with intervals: interquartile mean, probability of improvement, relative gain.

Their formulas work on arrays of any number of repeats, (..., T, S): tasks, and seeds of each, or nan if a task has no
such run, at the same places in every repeat. `runs` names for each task whose runs it measures: the columns of the same
runs have one name, and a seed of them is one draw, not several. A draw's contribution is summed over its columns before
variances are added.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from statistics import fmean
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import special

from dipole.benchmarks.statistics.differences import CONFIDENCE, NEEDED, NOISE, pairs_are_better
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
    return _interval(found.value, found.bounds(), values)


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


def _interval(value: Array, bounds: tuple[Array, Array], *samples: Array) -> Interval:
    low, high, needs = float(bounds[0]), float(bounds[1]), ""
    if not isfinite(low):
        low = high = nan
        seeds = min(int((~np.isnan(each)).sum(axis=-1).min()) for each in samples)
        needs = f"no interval: {NEEDED} seeds give one"
        if seeds >= NEEDED:
            needs = f"no interval: {seeds} seeds gave the same, more may differ"
    return Interval(float(value), low, high, needs)


class Estimates(NamedTuple):
    """Values (...), their variances and degrees of freedom. Both are nan if there is no spread."""

    value: Array
    variance: Array
    df: Array

    def bounds(self) -> tuple[Array, Array]:
        """value +- t_df sqrt(variance), or nan if every draw contributes the same: then there is no spread."""
        known = self.variance > 0
        t = special.stdtrit(np.where(known, self.df, 1.0), (1 + CONFIDENCE) / 2)
        half = np.where(known, t * np.sqrt(np.where(known, self.variance, 0.0)), np.nan)
        return self.value - half, self.value + half

    def p_values(self) -> Array:
        """Two-sided, of a true value of 0, or nan if there is no spread."""
        known = self.variance > 0
        t = np.abs(self.value) / np.sqrt(np.where(known, self.variance, np.nan))
        return cast(Array, 2 * special.stdtr(np.where(known, self.df, 1.0), -t))


def relative_gains(ours: Array, base: Array, runs: Sequence[Hashable]) -> Estimates:
    """Gain over the base in units of its mean, g_t = (x_t - b_t) / |b_t|: mean over tasks.

    Of T >= 8 tasks floor(T / 4) are cut at each end. A seed that both have is one draw of both (paired). Where
    `pairs_are_better` denies it, ours and those of the base are drawn apart (Welch). The base's mean is drawn too: to
    first order a pair adds (x - mean x - rho_t (b - mean b)) / (n |b_t|) to g_t, with rho_t = x_t / b_t. If all pairs
    of a task have the same difference, they show no spread, and the sides are drawn apart too.
    """
    found = _relative_gains(ours, base, runs, True)
    both = _present(ours, 2) & _present(base, 2)  # (T, S)
    same = np.zeros(found.value.shape, dtype=bool)
    for task, seeds in enumerate(both):
        if seeds.sum() >= NEEDED:
            x, b = ours[..., task, seeds], base[..., task, seeds]
            size = np.maximum(np.abs(x).max(axis=-1), np.abs(b).max(axis=-1))
            same |= np.ptp(x - b, axis=-1) <= NOISE * size
    if same.any():
        apart = _relative_gains(ours, base, runs, False)
        found = Estimates(*(np.where(same, b, a) for a, b in zip(found, apart, strict=True)))
    return found._replace(value=np.where(np.abs(found.value) > NOISE, found.value, 0.0))


def _relative_gains(ours: Array, base: Array, runs: Sequence[Hashable], is_paired: bool) -> Estimates:
    count = ours.shape[-2]
    gains, errors = [], []
    for task, name in enumerate(runs):
        of_ours, of_base = _against(ours[..., task, :], base[..., task, :], name, is_paired)
        level = np.abs(of_base.mean)
        gains.append((of_ours.mean - of_base.mean) / level)
        errors.append((of_ours.times(1 / level), of_base.times(-of_ours.mean / (of_base.mean * level))))
    found = np.stack(gains, axis=-1)
    cut = count // 4 if count >= TRIMMED_FROM else 0
    place = np.argsort(np.argsort(found, axis=-1), axis=-1)
    share = ((place >= cut) & (place < count - cut)) / (count - 2 * cut)
    parts = [part.times(share[..., task]) for task, each in enumerate(errors) for part in each]
    return _estimate(cast(Array, (found * share).sum(axis=-1)), parts, 1.0 + np.abs(found).max(axis=-1))


def interquartile_means(values: Array, runs: Sequence[Hashable]) -> Estimates:
    """Mean of the middle half of all runs of all tasks (Agarwal et al. 2021), floor(N / 4) of N cut at each end.

    Its variance is that of winsorized values (Tukey and McLaughlin 1963), summed over what is drawn together, and no
    less than `MIDDLE_HALF` times that of the mean: cut values tell little of the spread if there are few.
    """
    flat = values.reshape(*values.shape[:-2], -1)
    there = _present(flat)
    ordered = np.sort(flat[..., there], axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    left = count - 2 * cut
    low, high = ordered[..., [cut]], ordered[..., [count - cut - 1]]
    bounded = np.clip(values, low[..., None], high[..., None])
    value, scale = cast(Array, ordered[..., cut : count - cut].mean(axis=-1)), np.abs(ordered).max(axis=-1)
    estimates = []
    for each, over in ((bounded, left), (values, count)):
        parts = [_contribution(name, each[..., task, :]) for task, name in enumerate(runs)]
        estimates.append(_estimate(value, [part.times(part.count / over) for part in parts], scale))
    middle, whole = estimates
    wider = MIDDLE_HALF * whole.variance > middle.variance
    variance = np.where(wider, MIDDLE_HALF * whole.variance, middle.variance)
    return Estimates(value, variance, np.where(wider, whole.df, middle.df))


def probabilities_of_improvement(ours: Array, base: Array, runs: Sequence[Hashable]) -> tuple[Array, Array]:
    """P(a run of ours beats a run of base), ties half, averaged over tasks, and how many trials it is worth.

    A probability p from n runs a side has a variance of at most p (1 - p) / n, whatever the runs are drawn from (van
    Dantzig 1951), and columns of the same runs are no further trials. From many runs the variance is known better, by
    how often each of them wins (DeLong et al. 1988): it counts n - 1 to `PRIOR_SEEDS` of the bound.
    """
    tasks = ours.shape[-2]
    shares, parts, bound = [], [], np.inf
    for task, name in enumerate(runs):
        x, b = ours[..., task, :], base[..., task, :]
        beats = (x[..., :, None] > b[..., None, :]) + 0.5 * (x[..., :, None] == b[..., None, :])
        beats = np.where(np.isnan(x[..., :, None] + b[..., None, :]), np.nan, beats)  # (..., S, S)
        of_ours = np.nansum(beats, axis=-1) / _present(b).sum()
        of_base = np.nansum(beats, axis=-2) / _present(x).sum()
        shares.append(np.nansum(of_ours, axis=-1) / _present(x).sum())
        won = (("ours", np.where(_present(x), of_ours, np.nan)), ("base", np.where(_present(b), of_base, np.nan)))
        parts += [_contribution((side, name), cast(Array, each)).times(1 / tasks) for side, each in won]
    value = np.stack(shares, axis=-1).mean(axis=-1)
    for name in dict.fromkeys(runs):
        mine = [task for task, each in enumerate(runs) if each == name]
        fewest = min(int(_present(side[..., task, :]).sum()) for task in mine for side in (ours, base))
        if fewest < NEEDED:
            return value, np.full(value.shape, np.nan)
        bound = min(bound, fewest * tasks / len(mine))
    hedged = (value * bound + 0.5) / (bound + 1)  # all wins are no certainty
    most = hedged * (1 - hedged) / bound
    found = _estimate(value, parts).variance
    variance = ((bound - 1) * found + PRIOR_SEEDS * most) / (bound - 1 + PRIOR_SEEDS)
    return value, cast(Array, bound * most / variance)


def binomial_bounds(share: Array, trials: Array) -> tuple[Array, Array]:
    """Interval of a share of trials, of any number (Clopper and Pearson 1934): never of width 0, inside [0, 1]."""
    won, lost = share * trials, (1 - share) * trials
    tail = (1 - CONFIDENCE) / 2
    low = special.betaincinv(np.where(won > 0, won, np.nan), lost + 1, tail)
    high = special.betainccinv(won + 1, np.where(lost > 0, lost, np.nan), tail)
    return np.where(won > 0, low, won), np.where(lost > 0, high, 1 - lost)  # nan where there are no trials


def _present(values: Array, axes: int = 1) -> NDArray[np.bool_]:
    """Return which runs exist, the same in every repeat: (S,) or (T, S)."""
    return ~np.isnan(values.reshape(-1, *values.shape[-axes:])[0])


@dataclass(frozen=True)
class _Contribution:
    """A mean (...), what each draw of a name adds to its error, (..., S), 0 where missing, and the number of draws."""

    name: Hashable
    mean: Array
    error: Array
    count: int

    def times(self, factor: Array | float) -> "_Contribution":
        """Return the contribution to a multiple of the mean."""
        factor = np.asarray(factor)
        return _Contribution(self.name, self.mean * factor, self.error * factor[..., None], self.count)


def _contribution(name: Hashable, values: Array) -> _Contribution:
    """Return the contributions of the runs in values (..., S)."""
    count = int(_present(values).sum())
    mean = np.nansum(values, axis=-1) / count
    return _Contribution(name, mean, np.nan_to_num((values - mean[..., None]) / count), count)


def _against(ours: Array, base: Array, name: Hashable, is_paired: bool) -> tuple[_Contribution, _Contribution]:
    """Return both sides of one task. Draws of pairs have one name, if `pairs_are_better` on the common seeds."""
    both = _present(ours) & _present(base)
    if is_paired and pairs_are_better(*(int(each.sum()) for each in (both, _present(ours), _present(base)))):
        pairs = ("pairs", name)
        return _contribution(pairs, np.where(both, ours, np.nan)), _contribution(pairs, np.where(both, base, np.nan))
    return _contribution(("ours", name), ours), _contribution(("base", name), base)


def _estimate(value: Array, parts: Sequence[_Contribution], scale: Array | float = 1.0) -> Estimates:
    """Return a value with the variance that its draws give it (Satterthwaite 1946 over their names).

    Draws of one name and seed are summed first. Rounding at the size of the values, `scale`, is no spread.
    """
    together: dict[Hashable, list[_Contribution]] = {}
    for part in parts:
        together.setdefault(part.name, []).append(part)
    variance, spread = np.zeros(value.shape), np.zeros(value.shape)
    for each in together.values():
        count = max(part.count for part in each)
        if count < NEEDED:
            nothing = np.full(value.shape, np.nan)
            return Estimates(value, nothing, nothing)
        summed = np.sum([part.error for part in each], axis=0)
        own = count / (count - 1) * (summed**2).sum(axis=-1)
        own = np.where(own > (NOISE * scale) ** 2, own, 0.0)
        variance, spread = variance + own, spread + own**2 / (count - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimates(value, variance, variance**2 / spread)
