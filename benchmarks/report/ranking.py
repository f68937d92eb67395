"""Objectives ranked over tasks: wins and losses against a base, gain, critical differences, performance profiles."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, isnan, nan, sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from dipole.benchmarks.manifest import ColumnEntry
from dipole.benchmarks.report.chart import MOST_LINES, MOST_ROWS, Picture, pictured
from dipole.benchmarks.report.chart_types import Line, line_chart, rank_chart
from dipole.benchmarks.statistics import LEVEL, Interval, probability_of_improvement, relative_gain
from dipole.benchmarks.suite_results import Samples, SuiteResults
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

Tasks = Mapping[str, Mapping[str, Samples]]
ENOUGH = 5  # fewer data sets than this say nothing about others: their seeds are the blocks then


@dataclass(frozen=True)
class Rank:
    label: str
    tasks: int
    of_means: float  # mean over tasks of the rank of the objective's mean: 1 is best, nan is none
    better: int  # tasks that differ from the base beyond chance
    worse: int
    improvement: Interval | None  # probability that a run beats a run of the base
    gain: Interval | None  # in units of the base's mean
    missing: tuple[str, ...] = ()  # tasks without runs. There is no rank then
    tests: int = 1  # of the suite: the gain is corrected among them (Bonferroni)

    @property
    def has_gain(self) -> bool:
        """Whether the gain is significant among all tests of the suite."""
        return self.gain is not None and self.tests * self.gain.p < LEVEL


def ranks(results: SuiteResults) -> list[Rank]:
    """Return the rows ranked over the columns, best rank of means first. Rows without all columns have no rank."""
    tasks: dict[str, dict[str, Samples]] = defaultdict(dict)
    for column, row in product(results.manifest.columns, results.rows):
        if found := _signed(results, row.label, column):
            tasks[column.name][row.label] = found
    decided: dict[str, list[float]] = defaultdict(list)
    for cell in results.cells:
        if cell.row.base and cell.against_base is not None and cell.p_holm < LEVEL:
            decided[cell.row.label].append(cell.column.sign * cell.against_base.difference)
    ranked = rank_objectives(tasks, results.base, decided, results.run_groups)
    gains = sum(rank.gain is not None and isfinite(rank.gain.p) for rank in ranked)
    return [replace(rank, tests=len(results.tested) + gains) for rank in ranked]


def rank_objectives(
    tasks: Tasks,
    base: str | None,
    decided: Mapping[str, Sequence[float]],
    runs: Mapping[str, Hashable] | None = None,
) -> list[Rank]:
    """Rank objectives over tasks, best rank of means first. Objectives without results on a task come last, unranked.

    `tasks` has values by seed, larger is better: task -> objective -> seed. `decided` has the significant differences
    from the base of each objective. Tasks of one name in `runs` are measured on the same runs (default: all are).
    """
    from scipy.stats import rankdata  # late: it takes a second

    labels = list(dict.fromkeys(label for rows in tasks.values() for label in rows))
    missing = {label: tuple(task for task, rows in tasks.items() if label not in rows) for label in labels}
    ranks: dict[str, list[float]] = {label: [] for label in labels if not missing[label]}
    for rows in tasks.values():
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
            improvement, gain = _over(label, base, tasks, runs)
        count = len(tasks) - len(missing[label])
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
    if not all(fmean(side.values()) for side in theirs):
        return beats, None  # without a level there is no unit to count a gain in
    return beats, relative_gain(ours, theirs, runs=names)


def rank_charts(results: SuiteResults, groups: Sequence[Sequence[ColumnEntry]]) -> list[Picture]:
    """Profile and critical difference of the rows that have every column. `groups` are columns of the same runs."""
    if results.manifest.not_decidable:
        return []
    complete = [row.label for row in results.rows if all(results.samples(row.label, c) for c in results.columns)]
    if len(complete) < 2 or not results.columns:
        return []
    return [*_ranked(results, groups, complete), *_profile(results, complete)]


def _profile(results: SuiteResults, labels: Sequence[str]) -> list[Picture]:
    columns = results.manifest.columns
    tasks = [{label: list(_signed(results, label, column).values()) for label in labels} for column in columns]
    if max(len(runs) for task in tasks for runs in task.values()) < 2:
        return []
    shares = performance_profile(tasks)
    # By the area below: the mean place of a method's runs between the worst and the best.
    best = sorted(shares, key=lambda label: -sum(shares[label]))
    kept, chosen, several = best[:MOST_LINES], "the best", ""
    if results.base in shares:
        kept = [results.base, *(label for label in best if label != results.base)][:MOST_LINES]
        chosen = "the base and the best"
    if len(tasks) > 1:
        several = f", mean over {len(tasks)} columns"
    caption = (
        f"Performance profile: share of runs above tau{several}. The worst run of a column has tau 0, the best 1. "
        "A line above another is better at that tau."
    )
    if len(kept) < len(shares):
        caption += f" {len(kept)} of {counted(len(shares), 'row')}: {chosen}."
    lines = []
    for label, share in shares.items():
        if label in kept:
            lines.append(Line(label, [i / (len(share) - 1) for i in range(len(share))], share))
    title = f"{results.manifest.title}: performance profile"
    return pictured(line_chart(title, "tau", "share of runs above tau", lines, from_zero=True), caption)


def _ranked(results: SuiteResults, groups: Sequence[Sequence[ColumnEntry]], labels: Sequence[str]) -> list[Picture]:
    if not 3 <= len(labels) <= MOST_ROWS:
        return []
    is_by_seed, name, of = len(groups) < ENOUGH, "mean rank by data set", f"{len(groups)} data sets"
    blocks = [block for group in groups for block in _blocks(results, group, labels, is_by_seed)]
    if is_by_seed:
        sets, these = (of, "these") if len(groups) > 1 else ("one data set", "it")
        name = "mean rank by seed"
        of = f"{counted(len(blocks), 'block')}, each a seed of {sets} (the result holds for {these} only)"
    if len(blocks) < 2:
        return []
    found = critical_difference(blocks)
    title, ranks = f"{results.manifest.title}: critical difference", list(zip(found.labels, found.ranks, strict=True))
    chart = rank_chart(title, f"{name} (1 is best)", ranks, found.groups, found.difference)
    p, decided = f"p = {found.p:.2g}", "finds differences"
    if found.p < 0.001:
        p = "p < 0.001"
    if found.p >= LEVEL:
        decided = "finds no difference"
    caption = (
        f"{name.capitalize()}: over {of}. Friedman's test {decided} ({p}). Bars join rows that differ by less than "
        f"Nemenyi's critical difference, {found.difference:.2f} ranks at {LEVEL}."
    )
    return pictured(chart, caption)


def _signed(results: SuiteResults, label: str, column: ColumnEntry) -> Mapping[int, float]:
    """Return values by seed, larger is better."""
    return {seed: column.sign * value for seed, value in (results.samples(label, column.name) or {}).items()}


def _blocks(
    results: SuiteResults, group: Sequence[ColumnEntry], labels: Sequence[str], is_by_seed: bool
) -> list[dict[str, float]]:
    """Return the block of a data set, each row's mean place over the columns of its runs, or one per common seed."""
    taken = [{label: _signed(results, label, column) for label in labels} for column in group]
    if not is_by_seed:
        means = [{label: level_of(fmean(values.values())) for label, values in column.items()} for column in taken]
        return [_placed(means)]
    common = set.intersection(*(set(values) for column in taken for values in column.values()))
    return [_placed([{n: values[seed] for n, values in column.items()} for column in taken]) for seed in sorted(common)]


def _placed(columns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the values of one column, or over several columns the sum of each row's ranks (ties share theirs)."""
    if len(columns) == 1:
        return dict(columns[0])
    from scipy.stats import rankdata

    ranks = [rankdata(list(column.values())) for column in columns]
    return dict(zip(columns[0], map(float, sum(ranks)), strict=True))


@dataclass(frozen=True)
class CriticalDifference:
    """Mean ranks (1 is best, best first), Friedman's p, and the smallest significant difference of mean ranks."""

    labels: tuple[str, ...]
    ranks: tuple[float, ...]
    p: float
    difference: float
    groups: tuple[tuple[int, int], ...]  # places (first, last) of methods without a significant difference


def critical_difference(blocks: Sequence[Mapping[str, float]]) -> CriticalDifference:
    """Compare methods over N blocks as Demsar (JMLR 2006, Sec. 3.2.2) does.

    r_ij are the ranks inside each block, with midranks for ties. Friedman's Q, corrected for ties, is
    (k - 1) sum_j (sum_i d_ij)^2 / sum_ij d_ij^2 with d_ij = r_ij - (k + 1) / 2. It is compared with chi^2 of k - 1
    degrees of freedom. Nemenyi's CD = q sqrt(k (k + 1) / (6 N)), with q the studentized range of k means over sqrt(2).

    `blocks` are N >= 2 mappings of the same k >= 2 methods to a value, larger is better. Raise DataError for fewer, or
    if a method is missing from a block.
    """
    if len(blocks) < 2 or len(blocks[0]) < 2 or any(set(block) != set(blocks[0]) for block in blocks):
        raise DataError("a critical difference needs two blocks or more with the same methods, two or more")
    from scipy import stats  # late: it takes a second

    labels = list(blocks[0])
    # Values that differ in the last digits only are ties.
    values = np.array([[float(f"{block[label]:.10g}") for label in labels] for block in blocks])  # (N, k)
    ranks = stats.rankdata(-values, axis=1)
    n, k = ranks.shape
    off = ranks - (k + 1) / 2
    p = 1.0
    if off.any():
        p = float(stats.chi2.sf((k - 1) * (off.sum(axis=0) ** 2).sum() / (off**2).sum(), k - 1))
    difference = float(stats.studentized_range.ppf(1 - LEVEL, k, np.inf)) / sqrt(2) * sqrt(k * (k + 1) / (6 * n))
    means, names = zip(*sorted(zip(ranks.mean(axis=0).tolist(), labels, strict=True)), strict=True)
    groups: list[tuple[int, int]] = []
    if p >= LEVEL:
        groups.append((0, k - 1))
    # The longest ranges of means within the difference, none of one mean, none inside another.
    for first, mean in enumerate(means):
        last = max(i for i in range(first, k) if means[i] - mean < difference)
        if last > max([first, *(end for _, end in groups)]):
            groups.append((first, last))
    return CriticalDifference(names, means, p, difference, tuple(groups))


def performance_profile(tasks: Sequence[Mapping[str, Sequence[float]]], places: int = 51) -> dict[str, list[float]]:
    """Return the share of runs above tau, averaged over tasks (Agarwal et al. 2021, Sec. 4.2).

    tau is 0 at the worst run of a task and 1 at its best, at `places` equally spaced points, so tasks of different
    units have equal weight. `tasks` have the values of the runs of each method, larger is better. Methods without runs
    of a task are left out. Raise DataError for no task.
    """
    if not tasks:
        raise DataError("a performance profile needs a task or more")
    labels = [label for label in tasks[0] if all(task.get(label) for task in tasks)]
    taus = np.linspace(0, 1, places)
    above: dict[str, list[NDArray[np.float64]]] = {label: [] for label in labels}
    for task in tasks:
        every = [value for label in labels for value in task[label]] or [0.0]
        reach = (max(every) - min(every)) or 1.0
        for label in labels:
            scaled = (np.asarray(task[label], dtype=np.float64) - min(every)) / reach
            above[label].append((scaled[:, None] > taus).mean(axis=0))
    return {label: np.mean(shares, axis=0).tolist() for label, shares in above.items()}
