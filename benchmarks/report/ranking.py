"""Objectives ranked over tasks: mean rank, wins and losses against a base, probability of improvement, gain."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean

from dipole.benchmarks.statistics import Interval, difference, holm, probability_of_improvement, relative_gain

Samples = Mapping[int, float]
Tasks = Mapping[str, Mapping[str, Samples]]
LEVEL = 0.05


@dataclass(frozen=True)
class Rank:
    """One objective over several tasks. Without runs of all of them it has no rank.

    Args:
        label: of the row.
        tasks: how many it has runs of.
        mean_rank: 1 is best, or nan if it is not ranked.
        better: tasks on which it is better than the base beyond chance.
        worse: tasks on which it is worse.
        improvement: probability that a run beats a run of the base, or None if there is no base or no rank.
        gain: over the base, in units of its mean, or None likewise.
        missing: tasks without runs.
    """

    label: str
    tasks: int
    mean_rank: float
    better: int
    worse: int
    improvement: Interval | None
    gain: Interval | None
    missing: tuple[str, ...] = ()


def rank_objectives(
    tasks: Tasks,
    base: str | None,
    lower_is_better: Collection[str] = (),
    runs: Mapping[str, Hashable] | None = None,
    decided: Mapping[str, Sequence[float]] | None = None,
) -> list[Rank]:
    """Rank objectives over tasks, best mean rank first. Objectives without results on a task come last, unranked.

    Args:
        tasks: task -> objective -> value by seed.
        base: the objective the others are compared with.
        lower_is_better: tasks whose values are costs. They enter with the sign turned.
        runs: a name for each task. Tasks of one name are measured on the same runs. Default: all are.
        decided: significant differences from the base of each objective, larger is better, if they are known.
    """
    signed: dict[str, dict[str, Samples]] = {}
    for task, rows in tasks.items():
        sign = -1 if task in lower_is_better else 1
        signed[task] = {label: {seed: sign * v for seed, v in by.items()} for label, by in rows.items() if by}
    labels = list(dict.fromkeys(label for rows in signed.values() for label in rows))
    missing = {label: tuple(task for task, rows in signed.items() if label not in rows) for label in labels}
    ranks: dict[str, list[float]] = {label: [] for label in labels if not missing[label]}
    for rows in signed.values():
        means = {label: level_of(fmean(rows[label].values())) for label in ranks}
        for label, mean in means.items():
            above, level = sum(m > mean for m in means.values()), sum(m == mean for m in means.values())
            ranks[label].append(above + (level + 1) / 2)
    if decided is None:
        decided = _decided(signed, base)
    found = []
    for label in labels:
        better, worse = (sum(sign * gap > 0 for gap in decided.get(label, ())) for sign in (1, -1))
        rank, improvement, gain = nan, None, None
        if label in ranks:
            rank = fmean(ranks[label])
            improvement, gain = _over(label, base, signed, runs)
        count = len(signed) - len(missing[label])
        found.append(Rank(label, count, rank, better, worse, improvement, gain, missing[label]))
    return sorted(found, key=lambda r: (isnan(r.mean_rank), r.mean_rank, r.label))


def level_of(mean: float) -> float:
    """Round a mean to six digits: results are in single precision, so further digits differ by noise."""
    return float(f"{mean:.6g}")


def _decided(tasks: Tasks, base: str | None) -> dict[str, list[float]]:
    """Return the significant differences from the base by objective (Holm over all objectives and tasks)."""
    places = [
        (label, difference(rows[base], values))
        for rows in tasks.values()
        if base is not None and base in rows
        for label, values in rows.items()
        if label != base
    ]
    found: dict[str, list[float]] = {}
    for (label, test), p in zip(places, holm([test.p_t for _, test in places]), strict=True):
        if p < LEVEL:
            found.setdefault(label, []).append(test.difference)
    return found


def _over(
    label: str, base: str | None, tasks: Tasks, runs: Mapping[str, Hashable] | None
) -> tuple[Interval | None, Interval | None]:
    """Return probability of improvement and gain of an objective over the base, on all tasks."""
    if base is None or label == base or any(base not in rows for rows in tasks.values()):
        return None, None
    ours, theirs = [rows[label] for rows in tasks.values()], [rows[base] for rows in tasks.values()]
    names = None
    if runs is not None:
        names = [runs[task] for task in tasks]
    beats = probability_of_improvement(ours, theirs, runs=names)
    # Without a level there is no unit to count a gain in.
    if not all(fmean(side.values()) for side in theirs):
        return beats, None
    return beats, relative_gain(ours, theirs, runs=names)
