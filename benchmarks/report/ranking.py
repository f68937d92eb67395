"""Objectives ranked over tasks: rank of means, wins and losses against a base, probability of improvement, gain."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, isnan, nan
from statistics import fmean

from dipole.benchmarks.statistics import LEVEL, Interval, probability_of_improvement, relative_gain
from dipole.benchmarks.suite_results import Samples, SuiteResults

Tasks = Mapping[str, Mapping[str, Samples]]


@dataclass(frozen=True)
class Rank:
    """One objective over several tasks. Without runs of all of them (`missing`) it has no rank.

    `of_means` averages over tasks the rank of the objective's mean: 1 is best, nan is none. `better` and `worse` count
    the tasks that differ from the base beyond chance. `improvement` is the probability that a run beats a run of the
    base, and `gain` is in units of the base's mean.
    """

    label: str
    tasks: int
    of_means: float
    better: int
    worse: int
    improvement: Interval | None
    gain: Interval | None
    missing: tuple[str, ...] = ()
    tests: int = 1  # of the suite: the gain is corrected among them (Bonferroni)

    @property
    def has_gain(self) -> bool:
        """Whether the gain is significant among all tests of the suite."""
        return self.gain is not None and self.tests * self.gain.p < LEVEL


def ranks(results: SuiteResults) -> list[Rank]:
    """Return the rows ranked over the columns, best rank of means first. Rows without all columns have no rank."""
    costs = [c.name for c in results.manifest.columns if not c.higher_is_better]
    tasks: dict[str, dict[str, Samples]] = defaultdict(dict)
    for column, row in product(results.columns, results.rows):
        if found := results.samples(row.label, column):
            tasks[column][row.label] = found
    decided: dict[str, list[float]] = defaultdict(list)
    for cell in results.cells:
        if cell.row.base and cell.against_base is not None and cell.p_holm < LEVEL:
            decided[cell.row.label].append(cell.column.sign * cell.against_base.difference)
    ranked = rank_objectives(tasks, results.base, decided, costs, results.run_groups)
    gains = sum(rank.gain is not None and isfinite(rank.gain.p) for rank in ranked)
    return [replace(rank, tests=len(results.tested) + gains) for rank in ranked]


def rank_objectives(
    tasks: Tasks,
    base: str | None,
    decided: Mapping[str, Sequence[float]],
    lower_is_better: Collection[str] = (),
    runs: Mapping[str, Hashable] | None = None,
) -> list[Rank]:
    """Rank objectives over tasks, best rank of means first. Objectives without results on a task come last, unranked.

    Args:
        tasks: task -> objective -> value by seed.
        base: the objective the others are compared with.
        decided: significant differences from the base of each objective, larger is better.
        lower_is_better: tasks whose values are costs. They enter with the sign turned.
        runs: a name for each task. Tasks of one name are measured on the same runs. Default: all are.
    """
    from scipy.stats import rankdata  # late: it takes a second

    signed: dict[str, dict[str, Samples]] = {}
    for task, rows in tasks.items():
        sign = -1 if task in lower_is_better else 1
        signed[task] = {label: {seed: sign * v for seed, v in by.items()} for label, by in rows.items() if by}
    labels = list(dict.fromkeys(label for rows in signed.values() for label in rows))
    missing = {label: tuple(task for task, rows in signed.items() if label not in rows) for label in labels}
    ranks: dict[str, list[float]] = {label: [] for label in labels if not missing[label]}
    for rows in signed.values():
        means = {label: level_of(fmean(rows[label].values())) for label in ranks}
        places = rankdata([-mean for mean in means.values()])
        for label, place in zip(means, places.tolist(), strict=True):
            ranks[label].append(place)
    found = []
    for label in labels:
        better, worse = (sum(sign * gap > 0 for gap in decided.get(label, ())) for sign in (1, -1))
        rank, improvement, gain = nan, None, None
        if label in ranks:
            rank = fmean(ranks[label])
            improvement, gain = _over(label, base, signed, runs)
        count = len(signed) - len(missing[label])
        found.append(Rank(label, count, rank, better, worse, improvement, gain, missing[label]))
    return sorted(found, key=lambda r: (isnan(r.of_means), r.of_means, r.label))


def level_of(mean: float) -> float:
    """Round a mean to six digits: results are in single precision, so further digits differ by noise."""
    return float(f"{mean:.6g}")


def _over(
    label: str, base: str | None, tasks: Tasks, runs: Mapping[str, Hashable] | None
) -> tuple[Interval | None, Interval | None]:
    """Return probability of improvement and gain of an objective over the base, on all tasks."""
    if base is None or label == base or any(base not in rows for rows in tasks.values()):
        return None, None
    ours, theirs = [rows[label] for rows in tasks.values()], [rows[base] for rows in tasks.values()]
    names = [runs[task] for task in tasks] if runs else None
    beats = probability_of_improvement(ours, theirs, runs=names)
    # Without a level there is no unit to count a gain in.
    if not all(fmean(side.values()) for side in theirs):
        return beats, None
    return beats, relative_gain(ours, theirs, runs=names)
