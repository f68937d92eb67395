"""The pictures of a suite's numbers, and of runs outside suites. Each is a chart with a caption."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import isfinite, nan
from statistics import fmean

from dipole.benchmarks.manifest import ColumnEntry
from dipole.benchmarks.report import training_charts as training
from dipole.benchmarks.report.chart import NAMED, Picture, ends, first_of, pictured
from dipole.benchmarks.report.chart_types import ChartRow, Line, Tile, heat_map, interval_chart, line_chart
from dipole.benchmarks.report.ranking import Rank, rank_charts
from dipole.benchmarks.report.tables import NOTHING
from dipole.benchmarks.results_file import RunFiles
from dipole.benchmarks.statistics import Interval, number, summarize
from dipole.benchmarks.suite_results import SuiteResults, curves_on
from dipole.core.record import RunRecord

INTERVAL = "bar: 95 % interval"
SAME = 0.02  # A picture of values that differ by less than this share is left out
LEAST_OPTIONS = 4  # smallest number of rows, different in one option or two, that are drawn as a sweep
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
        found["Against the base"] = list(against_base(results).values())
        found["Over all columns"] = rank_charts(results, [group.columns for group in training.groups_of(results)])
    found |= training.training_pictures(results, runs)
    return {name: shown for name, shown in found.items() if shown}


def ranking(title: str, ranks: Sequence[Rank], base: str) -> list[Picture]:
    """Return probability of improvement and relative gain over the base, with intervals."""
    beats = [_of_interval(r.label, r.improvement) for r in ranks if r.improvement is not None]
    gains = [_of_interval(r.label, r.gain, 100.0) for r in ranks if r.improvement and r.gain is not None]
    probability = interval_chart(
        f"{title}: probability of improvement", "P(a run beats a run of the base), mean over tasks", beats, 0.5
    )
    gain = interval_chart(f"{title}: gain", "gain over the base (% of its mean)", gains)
    return [
        *pictured(probability, f"Against {base}. One half means no difference. Bar: 95 % interval."),
        *pictured(
            gain,
            f"Against {base}: mean over tasks. Bar: 95 % interval, seeds with their base, not corrected for several "
            "tests: the table says which gains are significant.",
        ),
    ]


def measured(results: SuiteResults) -> list[Picture]:
    """Return the cells of a suite: ours with the printed ones, options swept, or each column with its seeds."""
    if any(cell.printed is not None and cell.printed.mean is not None for cell in results.cells):
        return _beside_printed(results)
    if swept := _swept(results):
        return swept
    if len(results.columns) > 1 and len(results.rows) > 2:
        return _grid(results)
    found = []
    for column in results.manifest.columns:
        samples = {cell.row.label: list(cell.samples.values()) for cell in results.cells_of(column.name)}
        title, caption = f"{column.name}: all rows", f"{column.name}. Mean, {INTERVAL}, small dots the seeds."
        found += _compared(title, column.label, samples, "rows", caption)
    return found


def against_base(results: SuiteResults) -> dict[str, Picture]:
    """Return the differences of trained rows from their bases with 95 % intervals, by what is measured.

    Columns called "TASK: MEASUREMENT" share a picture for each measurement, with a marker for each task.
    """
    parts: dict[str, list[tuple[str, ColumnEntry]]] = {}
    for column in results.manifest.columns:
        task, _, measurement = column.name.rpartition(": ")
        parts.setdefault(measurement, []).append((task, column))
    found = {}
    for measurement, columns in parts.items():
        rows, open_ = [], {}
        for row in results.rows:
            for task, column in columns:
                cell = results.cell(row.label, column.name)
                test = cell.against_base if cell else None
                if cell is not None and test is not None and isfinite(test.low) and row.objective != "none":
                    rows.append(ChartRow(row.label, test.difference, test.low, test.high, source=task))
                    if why := cell.why_not_significant:
                        open_[" ".join(filter(None, (row.label, task and f"({task})")))] = why
        largest: dict[str, float] = {}
        for each in rows:
            largest[each.label] = max(each.value, largest.get(each.label, each.value), key=abs)
        shown, note = ends(list(largest), largest.__getitem__, "rows")
        rows = [each for each in rows if each.label in shown]
        unit = columns[0][1].unit.replace("%", "points")
        label = f"difference from the base, {measurement} ({unit})".replace(" ()", "")
        title = f"{results.manifest.title}, {measurement}"
        caption = f"{measurement}: difference of each row from its base. {INTERVAL.capitalize()}."
        if open_:
            reason = next(iter(open_.values()))
            caption += f" The interval excludes 0, but {reason}: {first_of(list(open_), NAMED)}."
        for picture in pictured(interval_chart(title, label, rows), caption, note):
            found[measurement] = picture
    return found


def _beside_printed(results: SuiteResults) -> list[Picture]:
    """One picture per column: our mean, interval and seeds over the printed number and its spread."""
    found = []
    for column in results.manifest.columns:
        rows = []
        for cell in results.cells_of(column.name):
            if cell.printed is not None and cell.printed.mean is not None:
                mean, std = cell.printed.mean, cell.printed.std or nan
                rows.append(ChartRow(cell.row.label, mean, mean - std, mean + std, source="printed"))
                if cell.summary is not None:
                    rows.append(_of_seeds(cell.row.label, list(cell.samples.values()), "ours"))
        if any(row.source == "ours" for row in rows):
            chart = interval_chart(f"{column.name}: ours beside the printed", column.label, rows, None)
            ours = f"Ours: mean, {INTERVAL}, small dots the seeds"
            found += pictured(chart, f"{column.name}. {ours}. Printed: bar one standard deviation.")
    return found


def _compared(title: str, label: str, samples: Mapping[str, Sequence[float]], what: str, caption: str) -> list[Picture]:
    rows = [_of_seeds(name, values) for name, values in samples.items() if values]
    if len(rows) < 2:
        return []
    shown, note = ends(rows, _value, what)
    return pictured(interval_chart(title, label, shown, None), caption, note)


def _grid(results: SuiteResults) -> list[Picture]:
    """Rows by columns as heat maps, one for each unit: differences from the base, or from the mean of the column."""
    units: dict[str, list[ColumnEntry]] = {}
    for column in results.manifest.columns:
        units.setdefault(column.unit, []).append(column)
    found, against = [], results.base or "the mean of the column"
    for unit, columns in units.items():
        of = f" ({unit})".replace(" ()", "")
        better = {row.label: [0.0] for row in results.rows}
        tiles = []
        for column in columns:
            cells = {cell.row.label: cell.summary.mean for cell in results.cells_of(column.name) if cell.summary}
            level = cells.get(results.base or "", fmean(cells.values() or [nan]))
            for row, mean in cells.items():
                better[row].append(column.sign * (mean - level))
                tiles.append(Tile(row, column.name, better[row][-1], f"{mean:.4g}"))
        means = {row: fmean(values) for row, values in better.items()}
        shown, note = ends(list(means), means.__getitem__, "rows")
        caption = f"Means over seeds{of}. Colour: by how much better than {against}."
        kept = [tile for tile in tiles if tile.row in shown]
        title = f"{results.manifest.title}: means{of}"
        found += pictured(heat_map(title, "", "", kept, f"better than {against} by{of}", 0.0), caption, note)
    return found


def _of_seeds(label: str, values: Sequence[float], source: str = "") -> ChartRow:
    found = summarize(list(values))
    return ChartRow(label, found.mean, found.low, found.high, values, source)


def _of_interval(label: str, found: Interval, factor: float = 1.0) -> ChartRow:
    return ChartRow(label, factor * found.value, factor * found.low, factor * found.high)


def _value(row: ChartRow) -> float:
    return row.value if isfinite(row.value) else 0.0


def varying(texts: Sequence[str]) -> tuple[list[str], list[tuple[float, ...]]]:
    """Return the options in which objectives differ, and their values in each. None if anything else differs."""
    found = [OPTION.findall(text) for text in texts]
    rests = {OPTION.sub(lambda m: m[1], text) for text in texts}
    if len(texts) < LEAST_OPTIONS or len(rests) != 1 or len({len(pairs) for pairs in found}) != 1:
        return [], []
    places = [i for i in range(len(found[0])) if len({pairs[i][1] for pairs in found}) > 1]
    return [found[0][i][0] for i in places], [tuple(float(pairs[i][1]) for i in places) for pairs in found]


def _swept(results: SuiteResults) -> list[Picture]:
    """Return lines if the rows differ in one option, or heat maps if they are at least half of a grid of two."""
    for texts in ([row.label for row in results.rows], [row.objective for row in results.rows]):
        names, values = varying(texts)
        if not names or len(set(values)) < len(values):
            continue
        places = {row.label: value for row, value in zip(results.rows, values, strict=True)}
        if len(names) == 1:
            return _one_way(results, names[0], {label: value for label, (value,) in places.items()})
        if len(names) == 2 and 2 * len(values) >= len({a for a, _ in values}) * len({b for _, b in values}):
            return _two_way(results, names, places)
    return []


def _one_way(results: SuiteResults, name: str, places: Mapping[str, float]) -> list[Picture]:
    """A line of means with intervals over the option's values for each column."""
    found = []
    for column in results.manifest.columns:
        cells = sorted(results.cells_of(column.name), key=lambda cell: places[cell.row.label])
        known = [(places[cell.row.label], cell.summary) for cell in cells if cell.summary is not None]
        if len(known) < 2:
            continue
        means, low, high = zip(*[(summary.mean, summary.low, summary.high) for _, summary in known], strict=True)
        line = Line(column.name, [x for x, _ in known], means, low, high)
        chart = line_chart(f"{column.name} over {name}", name, column.label, [line])
        found += pictured(chart, f"{column.name} over {name}: mean over seeds, band of the 95 % interval.")
    return found


def _two_way(results: SuiteResults, names: Sequence[str], places: Mapping[str, Sequence[float]]) -> list[Picture]:
    """A heat map of means for each column, one option over the other."""
    found, (across, up) = [], names
    for column in results.manifest.columns:
        tiles = []
        # In the order of the numbers, whichever tiles are missing.
        for label, (x, y) in sorted(places.items(), key=lambda each: (-each[1][1], each[1][0])):
            if (mean := results.value(label, column.name)) is not None:
                tiles.append(Tile(f"{y:g}", f"{x:g}", mean, number(mean)))
        chart = heat_map(f"{column.name}: {up} by {across}", across, up, tiles, column.label)
        found += pictured(chart, f"{column.name}: means over seeds, {up} by {across}.")
    return found


def _columns(results: SuiteResults) -> list[Picture]:
    """Draw a line per row over the numbers in the columns' names, by data set (before the slash: "digits/blocks=2")."""
    found, manifest = [], results.manifest
    for part, group in groupby(results.columns, key=lambda name: name.rpartition("/")[0]):
        names, title, mean = list(group), manifest.title, "Mean"
        if part:
            title, mean = f"{title}: {part}", f"{part}: mean"
        xs = [float(i) for i in range(len(names))]
        with suppress(ValueError):
            xs = [float(name.rpartition("=")[2]) for name in names]
        lines = []
        for row in results.rows:
            summaries = [getattr(results.cell(row.label, name), "summary", None) or NOTHING for name in names]
            if any(s.n for s in summaries):
                low, high = [s.mean - s.std for s in summaries], [s.mean + s.std for s in summaries]
                lines.append(Line(row.label, xs, [s.mean for s in summaries], low, high))
        caption = f"{mean} over seeds, band of one standard deviation."
        found += training.lines_or_map(title, manifest.x_label, manifest.y_label, lines, caption)
    return found


def cost(results: SuiteResults) -> list[Picture]:
    """Return wall time and memory of the runs by row, for every group of runs, unless every row took the same."""
    found = []
    for group in training.groups_of(results):
        column = group.columns[0].name
        runs = {name: results.runs_of(first, column) for first, name in training.models_of(results, group).items()}
        found += _costs(group.title, runs)
    return found


def _costs(title_of: Callable[[str], str], runs: Mapping[str, Sequence[RunRecord]]) -> list[Picture]:
    found = []
    measures: Sequence[tuple[str, str, Callable[[RunRecord], float]]] = (
        ("wall time of a run", "s", lambda run: run.wall_seconds),
        # The memory of the GPU if there was one, else of the process.
        ("largest memory of a run", "MB", lambda run: (run.peak_device_bytes or run.peak_memory_bytes) / 2**20),
    )
    for what, unit, measure in measures:
        values = {label: list(map(measure, each)) for label, each in runs.items() if each}
        means = [fmean(each) for each in values.values()]
        if len(means) < 2 or max(means) - min(means) <= SAME * max(means):
            continue
        every = [ChartRow(label, fmean(v), min(v), max(v), v) for label, v in values.items()]
        rows, note = ends(every, _value, "objectives")
        title = title_of(what)
        warning = "Compare only rows of one machine: the list of runs names them"
        chart = interval_chart(title, f"{what} ({unit})", rows, None)
        found += pictured(chart, f"{title}: mean, bar from least to most. {warning}.", note)
    return found


def other_runs(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]], runs: RunFiles) -> dict[str, list[Picture]]:
    """Return results, curves and cost by objective of runs outside suites, for every task that has several runs."""
    found: dict[str, list[Picture]] = {"Comparison": [], "Learning curves": [], "Training loss": [], "Cost": []}
    for task, by in groups.items():
        records = [record for each in by.values() for record in each]
        metrics = list(dict.fromkeys(name for record in records for name in record.results))
        names = [training.LOSS, *map(training.logged_name, metrics)]
        read = {label: [runs.curves(record.hash, names) for record in each] for label, each in by.items()}
        for metric in metrics:
            samples = {name: [v for r in each if (v := r.results.get(metric)) is not None] for name, each in by.items()}
            title = f"{task}: {metric}"
            caption = f"{title}. Mean, {INTERVAL}, small dots the runs."
            found["Comparison"] += _compared(title, metric, samples, "objectives", caption)
            lines = training.lines_of(read, training.logged_name(metric))
            found["Learning curves"] += training.learning_curves(title, metric, lines, curves_on(records))
        often, title_of = sorted(read, key=lambda objective: -len(by[objective])), training.Group((), task).title
        found["Training loss"] += training.loss_pictures(title_of, read, often, "those with most runs")
        found["Cost"] += _costs(title_of, by)
    return {name: shown for name, shown in found.items() if shown}
