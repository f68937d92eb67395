"""The pictures of a suite's numbers, and of runs outside suites. Each is a chart with a caption."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import isfinite, nan
from statistics import fmean

from dipole.benchmarks.manifest import ColumnEntry
from dipole.benchmarks.report.comparisons import compared
from dipole.benchmarks.report.curve_charts import Line, line_chart
from dipole.benchmarks.report.picture import Picture, ends, pictured
from dipole.benchmarks.report.ranking import Rank
from dipole.benchmarks.report.results import CellResult, SuiteResults, curves_on, measure
from dipole.benchmarks.report.row_charts import Estimate, Tile, heat_map, interval_chart
from dipole.benchmarks.report.run_files import RunFiles
from dipole.benchmarks.report.table import number
from dipole.benchmarks.report.training_charts import (
    LOSS,
    MEANS,
    Group,
    groups_of,
    lines_of,
    lines_or_map,
    logged_name,
    loss_pictures,
    models_of,
    training_pictures,
)
from dipole.benchmarks.statistics import Interval, summarize
from dipole.core.record import RunRecord

INTERVAL = "bar: 95 % interval"
SAME = 0.02
"""A picture of values that differ by less than this share is left out."""
LEAST_OPTIONS = 4
"""Rows that differ in one option or two are a sweep if there are so many."""
OPTION = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")


def pictures(results: SuiteResults, runs: RunFiles) -> dict[str, list[Picture]]:
    """Return all pictures of a suite by kind, in the order of the report. Kinds without data are absent."""
    manifest = results.manifest
    found: dict[str, list[Picture]] = {}
    if manifest.kind == "figure" and "columns" in manifest.show:
        found["Measurements"] = _columns(results)
    else:
        found["Measurements"] = measured(results)
    if manifest.kind == "study":
        found["Over all columns"] = compared(results, [group.columns for group in groups_of(results)])
    found |= training_pictures(results, runs)
    return {name: shown for name, shown in found.items() if shown}


def ranking(title: str, ranks: Sequence[Rank], base: str) -> list[Picture]:
    """Return probability of improvement and relative gain over the base, with intervals."""
    rows = [r for r in ranks if r.improvement is not None]
    beats = [_estimate(r.label, r.improvement) for r in rows if r.improvement is not None]
    gains = [_estimate(r.label, r.gain, 100.0) for r in rows if r.gain is not None]
    probability = interval_chart(
        f"{title}: probability of improvement", "P(a run beats a run of the base), mean over tasks", beats, 0.5
    )
    gain = interval_chart(f"{title}: gain", "gain over the base (% of its mean)", gains)
    return [
        *pictured(probability, f"Against {base}. One half means no difference. Bar: 95 % interval."),
        *pictured(gain, f"Against {base}: mean over the middle tasks. Bar: 95 % interval, seeds with their base."),
    ]


def measured(results: SuiteResults) -> list[Picture]:
    """Return the cells of a suite: ours with the printed ones, options swept, or each column with its seeds."""
    if any(cell.printed is not None and cell.printed.mean is not None for cell in results.cells):
        return _beside_printed(results)
    if swept := _two_way(results) or _one_way(results):
        return swept
    if len(results.columns) > 1 and len(results.rows) > 2:
        return _grid(results)
    return _by_column(results)


def _beside_printed(results: SuiteResults) -> list[Picture]:
    """One picture per column: our mean, interval and seeds over the printed number and its spread."""
    found = []
    for column in results.manifest.columns:
        rows = []
        for cell in _cells(results, column):
            if cell.printed is None or cell.printed.mean is None:
                continue
            mean, std = cell.printed.mean, cell.printed.std or nan
            rows.append(Estimate(cell.row.label, mean, mean - std, mean + std, source="printed"))
            if cell.summary is not None:
                rows.append(_of_seeds(cell.row.label, list(cell.samples.values()), "ours"))
        if any(row.source == "ours" for row in rows):
            chart = interval_chart(f"{column.name}: ours beside the printed", column.label, rows, None)
            caption = (
                f"{column.name}. Ours: mean, {INTERVAL}, small dots the seeds. Printed: bar one standard deviation."
            )
            found += pictured(chart, caption)
    return found


def _by_column(results: SuiteResults) -> list[Picture]:
    found = []
    for column in results.manifest.columns:
        cells = _cells(results, column)
        rows = [_of_seeds(c.row.label, list(c.samples.values())) for c in cells if c.summary is not None]
        if len(rows) > 1:
            shown, note = ends(rows, _value, "rows")
            chart = interval_chart(f"{column.name}: all rows", column.label, shown, None)
            found += pictured(chart, f"{column.name}. Mean, {INTERVAL}, small dots the seeds.", note)
    return found


def _grid(results: SuiteResults) -> list[Picture]:
    """Rows by columns as heat maps, one for each unit: differences from the base, or from the mean of the column."""
    units: dict[str, list[ColumnEntry]] = {}
    for column in results.manifest.columns:
        units.setdefault(column.unit, []).append(column)
    found = []
    for unit, columns in units.items():
        of = ""
        if unit:
            of = f" ({unit})"
        means = {row.label: _mean_over(results, row.label, columns) for row in results.rows}
        shown, note = ends(list(means), means.__getitem__, "rows")
        tiles = []
        for column in columns:
            level = results.value(results.base or "", column.name)
            if level is None:
                level = _column_mean(results, column.name)
            for cell in _cells(results, column):
                if cell.row.label in shown and cell.summary is not None:
                    mean = cell.summary.mean
                    tiles.append(Tile(cell.row.label, column.name, column.sign * (mean - level), f"{mean:.4g}"))
        against = results.base or "the mean of the column"
        title = f"{results.manifest.title}: means{of}"
        caption = f"Means over seeds{of}. Colour: by how much better than {against}."
        found += pictured(heat_map(title, "", "", tiles, f"better than {against} by{of}", 0.0), caption, note)
    return found


def _mean_over(results: SuiteResults, row: str, columns: Sequence[ColumnEntry]) -> float:
    """Mean of a row over columns of one unit, with the sign of costs turned."""
    values = [c.sign * value for c in columns if (value := results.value(row, c.name)) is not None]
    return fmean(values or [0.0])


def _column_mean(results: SuiteResults, column: str) -> float:
    values = [value for row in results.rows if (value := results.value(row.label, column)) is not None]
    return fmean(values or [nan])


def _cells(results: SuiteResults, column: ColumnEntry) -> list[CellResult]:
    return [cell for row in results.rows if (cell := results.cell(row.label, column.name)) is not None]


def _of_seeds(label: str, values: Sequence[float], source: str = "") -> Estimate:
    found = summarize(list(values))
    return Estimate(label, found.mean, found.low, found.high, values, source)


def _estimate(label: str, found: Interval, factor: float = 1.0) -> Estimate:
    return Estimate(label, factor * found.value, factor * found.low, factor * found.high)


def _value(row: Estimate) -> float:
    if isfinite(row.value):
        return row.value
    return 0.0


def options_of(texts: Sequence[str]) -> tuple[tuple[str, str], list[tuple[float, float]]] | None:
    """Return names and values of the two options in which texts differ ("hcl(beta=1, temperature=0.5)"), or None.

    The texts are a grid if both options have two values or more, and half of their pairs are there, each once.
    """
    names, values = _varying(texts)
    if len(names) != 2:
        return None
    pairs = [(first, second) for first, second in values]
    sizes = [len({pair[i] for pair in pairs}) for i in (0, 1)]
    if len(set(pairs)) != len(pairs) or 2 * len(pairs) < sizes[0] * sizes[1]:
        return None
    return (names[0], names[1]), pairs


def option_of(texts: Sequence[str]) -> tuple[str, list[float]] | None:
    """Return name and values of the only option in which texts differ, each value once, or None."""
    names, values = _varying(texts)
    if len(names) != 1 or len(set(values)) != len(values):
        return None
    return names[0], [value for (value,) in values]


def _varying(texts: Sequence[str]) -> tuple[list[str], list[tuple[float, ...]]]:
    """Options in which the texts differ, and their values in each text, none if anything else differs."""
    found = [OPTION.findall(text) for text in texts]
    rests = {OPTION.sub(lambda m: m[1], text) for text in texts}
    if len(texts) < LEAST_OPTIONS or len(rests) != 1 or len({len(pairs) for pairs in found}) != 1:
        return [], []
    places = [i for i in range(len(found[0])) if len({pairs[i][1] for pairs in found}) > 1]
    return [found[0][i][0] for i in places], [tuple(float(pairs[i][1]) for i in places) for pairs in found]


def _one_way(results: SuiteResults) -> list[Picture]:
    """A line of means with intervals over the option's values for each column, if the rows differ in one option."""
    rows = list(results.rows)
    sweep = option_of([row.label for row in rows]) or option_of([row.objective for row in rows])
    if sweep is None:
        return []
    name, values = sweep
    ordered = sorted(zip(values, (row.label for row in rows), strict=True))
    found = []
    for column in results.manifest.columns:
        cells = [(x, results.cell(label, column.name)) for x, label in ordered]
        known = [(x, cell.summary) for x, cell in cells if cell is not None and cell.summary is not None]
        if len(known) < 2:
            continue
        means = [summary.mean for _, summary in known]
        low, high = [summary.low for _, summary in known], [summary.high for _, summary in known]
        line = Line(column.name, [x for x, _ in known], means, low, high)
        chart = line_chart(f"{column.name} over {name}", name, column.label, [line])
        found += pictured(chart, f"{column.name} over {name}: mean over seeds, band of the 95 % interval.")
    return found


def _two_way(results: SuiteResults) -> list[Picture]:
    """A heat map of means for each column, if the rows are a grid of two options."""
    rows = list(results.rows)
    grid = options_of([row.label for row in rows]) or options_of([row.objective for row in rows])
    if grid is None:
        return []
    (across, up), values = grid
    places = {row.label: place for row, place in zip(rows, values, strict=True)}
    found = []
    for column in results.manifest.columns:
        tiles = []
        # In the order of the numbers, whichever tiles are missing.
        for label, (x, y) in sorted(places.items(), key=lambda each: (-each[1][1], each[1][0])):
            mean = results.value(label, column.name)
            if mean is not None:
                tiles.append(Tile(f"{y:g}", f"{x:g}", mean, number(mean)))
        chart = heat_map(f"{column.name}: {up} by {across}", across, up, tiles, column.label)
        found += pictured(chart, f"{column.name}: means over seeds, {up} by {across}.")
    return found


def _columns(results: SuiteResults) -> list[Picture]:
    """Draw one line per row over the columns, at the numbers in the columns' names.

    Each data set has its own picture. A column's data set comes before the slash ("digits/blocks=2").
    """
    found = []
    for part, names in groupby(results.columns, key=lambda name: name.rpartition("/")[0]):
        title, mean = results.manifest.title, "Mean"
        if part:
            title, mean = f"{title}: {part}", f"{part}: mean"
        found += _column_picture(results, title, list(names), f"{mean} over seeds, band of one standard deviation.")
    return found


def _column_picture(results: SuiteResults, title: str, names: Sequence[str], caption: str) -> list[Picture]:
    try:
        xs = [float(name.rpartition("=")[2]) for name in names]
    except ValueError:
        xs = [float(i) for i in range(len(names))]
    lines = []
    for row in results.rows:
        summaries = [getattr(results.cell(row.label, name), "summary", None) for name in names]
        means = [getattr(summary, "mean", nan) for summary in summaries]
        spread = [getattr(summary, "std", nan) for summary in summaries]
        if any(mean == mean for mean in means):
            low = [m - s for m, s in zip(means, spread, strict=True)]
            high = [m + s for m, s in zip(means, spread, strict=True)]
            lines.append(Line(row.label, xs, means, low, high))
    return lines_or_map(title, results.manifest.x_label, results.manifest.y_label, lines, caption)


def cost(results: SuiteResults) -> list[Picture]:
    """Return wall time and memory of the runs by row, for every group of runs, unless every row took the same."""
    found = []
    for group in groups_of(results):
        column = group.columns[0].name
        runs = {name: results.runs_of(first, column) for first, name in models_of(results, group).items()}
        found += _costs(group.title, runs)
    return found


def _costs(title_of: Callable[[str], str], runs: Mapping[str, Sequence[RunRecord]]) -> list[Picture]:
    found = []
    runs = {label: each for label, each in runs.items() if each}
    seconds = {label: [record.wall_seconds for record in each] for label, each in runs.items()}
    memory = {label: [_memory(record) for record in each] for label, each in runs.items()}
    for what, unit, values in (("wall time of a run", "s", seconds), ("largest memory of a run", "MB", memory)):
        means = [fmean(each) for each in values.values()]
        if len(means) < 2 or max(means) - min(means) <= SAME * max(means):
            continue
        every = [Estimate(label, fmean(v), min(v), max(v), v) for label, v in values.items()]
        rows, note = ends(every, _value, "objectives")
        title = title_of(what)
        caption = (
            f"{title}: mean, bar from least to most. Compare only rows of one machine: the list of runs names them."
        )
        found += pictured(interval_chart(title, f"{what} ({unit})", rows, None), caption, note)
    return found


def _memory(record: RunRecord) -> float:
    """MB on the GPU if there was one, else of the process."""
    return (record.peak_device_bytes or record.peak_memory_bytes) / 2**20


def other_runs(groups: Mapping[str, Sequence[RunRecord]], runs: RunFiles) -> dict[str, list[Picture]]:
    """Return results, curves and cost by objective of runs outside suites, for every task that has several runs."""
    found: dict[str, list[Picture]] = {"Comparison": [], "Learning curves": [], "Training loss": [], "Cost": []}
    for task, records in groups.items():
        by: dict[str, list[RunRecord]] = {}
        for record in records:
            by.setdefault(record.objective, []).append(record)
        metrics = list(dict.fromkeys(name for record in records for name in record.results))
        for metric in metrics:
            found["Comparison"] += _compared(task, metric, by)
        names = [logged_name(metric) for metric in metrics]
        read = {label: [runs.curves(record.hash, [LOSS, *names]) for record in each] for label, each in by.items()}
        for name in names:
            lines = lines_of(read, name)
            if any(len(line.x) > 1 for line in lines):
                shown = name.removeprefix("eval/")
                title = f"{task}: {shown} while training"
                caption = f"{title}, {curves_on(records)} part. {MEANS}"
                found["Learning curves"] += lines_or_map(title, "training step", shown, lines, caption)
        often = sorted(read, key=lambda objective: -len(by[objective]))
        title_of = Group((), task).title
        found["Training loss"] += loss_pictures(title_of, read, often, "those with most runs")
        found["Cost"] += _costs(title_of, by)
    return {name: shown for name, shown in found.items() if shown}


def _compared(task: str, metric: str, by: Mapping[str, Sequence[RunRecord]]) -> list[Picture]:
    values = {label: [v for r in each if (v := measure(r, metric)) is not None] for label, each in by.items()}
    rows = [_of_seeds(label, each) for label, each in values.items() if each]
    if len(rows) < 2:
        return []
    shown, note = ends(rows, _value, "objectives")
    chart = interval_chart(f"{task}: {metric}", metric, shown, None)
    return pictured(chart, f"{task}: {metric}. Mean, {INTERVAL}, small dots the runs.", note)
