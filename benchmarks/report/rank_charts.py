"""Compare the rows of a suite over all its columns: performance profiles, and mean ranks with significance."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from dipole.benchmarks.critical import LEVEL, critical_difference, performance_profile
from dipole.benchmarks.manifest import ColumnEntry
from dipole.benchmarks.report.contents import MOST_LINES, MOST_ROWS, Picture, pictured
from dipole.benchmarks.report.curve_charts import Line, line_chart
from dipole.benchmarks.report.ranking import level_of
from dipole.benchmarks.report.row_charts import rank_chart
from dipole.benchmarks.suite_results import SuiteResults
from dipole.core.utils.text import counted

# Fewer data sets than this say nothing about others: their seeds are the blocks then.
ENOUGH = 5


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
    if len(groups) >= ENOUGH:
        blocks, of = [_means(results, group, labels) for group in groups], f"{len(groups)} data sets"
        name = "mean rank by data set"
    else:
        name = "mean rank by seed"
        blocks = [block for group in groups for block in _by_seed(results, group, labels)]
        sets, these = "one data set", "it"
        if len(groups) > 1:
            sets, these = f"{len(groups)} data sets", "these"
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


def _means(results: SuiteResults, group: Sequence[ColumnEntry], labels: Sequence[str]) -> dict[str, float]:
    """Return the block of one data set: each row's mean place over the columns of the same runs."""
    taken = [{label: _signed(results, label, column) for label in labels} for column in group]
    return _placed([{label: level_of(fmean(values.values())) for label, values in column.items()} for column in taken])


def _by_seed(results: SuiteResults, group: Sequence[ColumnEntry], labels: Sequence[str]) -> list[dict[str, float]]:
    """Return a block for each seed that all rows have."""
    taken = [{label: _signed(results, label, column) for label in labels} for column in group]
    common = set.intersection(*(set(values) for column in taken for values in column.values()))
    return [_placed([{n: values[seed] for n, values in column.items()} for column in taken]) for seed in sorted(common)]


def _placed(columns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the values of one column, or over several columns the sum of each row's ranks (ties share theirs)."""
    if len(columns) == 1:
        return dict(columns[0])
    from scipy.stats import rankdata  # late: it takes a second

    ranks = [rankdata(list(column.values())) for column in columns]
    return dict(zip(columns[0], map(float, sum(ranks)), strict=True))
