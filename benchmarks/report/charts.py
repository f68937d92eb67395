"""The pictures of a suite and of runs outside suites: what is drawn of which data, each a chart and its caption."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from dipole.benchmarks.manifest import ColumnEntry, Manifest, RowEntry
from dipole.benchmarks.report import kinds
from dipole.benchmarks.report.beside import Beside
from dipole.benchmarks.report.comparisons import compared
from dipole.benchmarks.report.curves import Curve, mean_line
from dipole.benchmarks.report.grids import one_way, two_way
from dipole.benchmarks.report.picture import MOST_LINES, Picture, ends, pictured
from dipole.benchmarks.report.ranking import Rank
from dipole.benchmarks.report.results import CellResult, SuiteResults, curves_on, measure
from dipole.benchmarks.statistics import Interval, summarize
from dipole.core.record import RunRecord
from dipole.core.utils.text import counted

ENTROPY, ENTROPY_MAXIMUM = "diag/conditional_entropy", "diag/conditional_entropy_maximum"
RANK = "diag/rank"
LOSS = "train/loss"
SCATTER = "scatter"
"""What a suite shows whose runs leave points."""
INTERVAL = "bar: 95 % interval"
# More histograms than this are compared as rows of a heat map.
MOST_HISTOGRAMS = 6
# Values closer than this are one value: a picture of them says nothing that a sentence does not.
SAME = 0.02


def pictures(results: SuiteResults, runs: Path | Beside) -> dict[str, list[Picture]]:
    """All pictures of a suite by kind, in the order of the report; kinds without data are absent.

    `runs` is the folder of the runs, or what lies beside their records wherever they are.
    """
    runs = Beside.of(runs)
    found: dict[str, list[Picture]] = {}
    if results.manifest.kind == "figure" and "columns" in results.manifest.show:
        found["Measurements"] = _columns(results)
    else:
        found["Measurements"] = measured(results)
    if results.manifest.kind == "study":
        found["Over all columns"] = compared(results, [group.columns for group in _groups(results)])
    curves, losses, entropy, ranks, histograms = [], [], [], [], []
    for group in _groups(results):
        lines = _read(results, group, runs)
        models = {name: lines[first] for first, name in _models(results, group).items()}
        if "curves" in results.manifest.show:
            curves += _curves(group, lines, results.curves_on)
            losses += _losses(results, group, models)
        if "paths" in results.manifest.show:
            curves += _paths(group, lines)
        entropy += _entropy(results, group, models)
        ranks += _ranks(results, group, models)
        histograms += _histograms(results, group)
    found["Embedded points"] = _scatter(results, runs)
    found["Learning curves"] = curves
    found["Training loss"] = losses
    found["Distance histograms"] = histograms
    found["Conditional entropy"] = entropy
    found["Rank of the embeddings"] = ranks
    return {name: shown for name, shown in found.items() if shown}


def ranking(title: str, ranks: Sequence[Rank], base: str) -> list[Picture]:
    """Probability of improvement and relative gain over the base, with intervals."""
    rows = [r for r in ranks if r.improvement is not None]
    beats = [_estimate(r.label, r.improvement) for r in rows if r.improvement is not None]
    gains = [_estimate(r.label, r.gain, 100.0) for r in rows if r.gain is not None]
    probability = kinds.interval_chart(
        f"{title}: probability of improvement", "P(a run beats a run of the base), mean over tasks", beats, 0.5
    )
    gain = kinds.interval_chart(f"{title}: gain", "gain over the base (% of its mean)", gains)
    return [
        *pictured(probability, f"Against {base}; one half means no difference. Bar: 95 % interval."),
        *pictured(gain, f"Against {base}: mean over the middle tasks. Bar: 95 % interval, seeds with their base."),
    ]


def measured(results: SuiteResults) -> list[Picture]:
    """The cells of a suite: ours beside the printed ones, options swept, or each column with its seeds."""
    if any(cell.printed is not None and cell.printed.mean is not None for cell in results.cells):
        return _forest(results)
    if swept := two_way(results) or one_way(results):
        return swept
    return _grid(results) if len(results.columns) > 1 and len(results.rows) > 2 else _by_column(results)


def _forest(results: SuiteResults) -> list[Picture]:
    """One picture per column: our mean, interval and seeds over the printed number and its spread."""
    found = []
    for column in results.manifest.columns:
        rows = []
        for cell in _cells(results, column):
            if cell.printed is None or cell.printed.mean is None:
                continue
            mean, std = cell.printed.mean, cell.printed.std or nan
            rows.append(kinds.Estimate(cell.row.label, mean, mean - std, mean + std, source="printed"))
            if cell.summary is not None:
                rows.append(_of_seeds(cell.row.label, list(cell.samples.values()), "ours"))
        chart = kinds.interval_chart(f"{column.name}: ours beside the printed", _named(column), rows, None)
        if any(row.source == "ours" for row in rows):
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
            shown, said = ends(rows, _value, "rows")
            chart = kinds.interval_chart(f"{column.name}: all rows", _named(column), shown, None)
            found += pictured(chart, f"{column.name}. Mean, {INTERVAL}, small dots the seeds.", said)
    return found


def _value(row: kinds.Estimate) -> float:
    return row.value if isfinite(row.value) else 0.0


def _grid(results: SuiteResults) -> list[Picture]:
    """Rows by columns as heat maps, one for each unit: differences from the base where there is one."""
    units: dict[str, list[ColumnEntry]] = {}
    for column in results.manifest.columns:
        units.setdefault(column.unit, []).append(column)
    found = []
    for unit, columns in units.items():
        of = f" ({unit})" if unit else ""
        tiles = []
        # Of many rows those that are much better or worse than the others, by their mean over the columns.
        means = {row.label: _gain(results, row.label, columns) for row in results.rows}
        shown, said = ends(list(means), lambda label: means[label], "rows")  # noqa: B023
        kept = set(shown)
        for cell in (cell for column in columns for cell in _cells(results, column) if cell.row.label in kept):
            level = results.value(results.base or "", cell.column.name)
            level = _column_mean(results, cell.column.name) if level is None else level
            if cell.summary is not None:
                # A cost that falls is better: colours say which is, numbers what was measured.
                sign = 1 if cell.column.higher_is_better else -1
                difference = sign * (cell.summary.mean - level)
                tiles.append(kinds.Tile(cell.row.label, cell.column.name, difference, f"{cell.summary.mean:.4g}"))
        against = results.base or "the mean of the column"
        title = f"{results.manifest.title}: means{of}"
        label = f"better than {against} by{of}"
        caption = f"Means over seeds{of}. Colour: by how much better than {against}."
        found += pictured(kinds.heat_map(title, "", "", tiles, label, 0.0), caption, said)
    return found


def _gain(results: SuiteResults, row: str, columns: Sequence[ColumnEntry]) -> float:
    """Mean of a row over columns of one unit, costs with their sign turned."""
    found = [(1 if c.higher_is_better else -1, results.value(row, c.name)) for c in columns]
    values = [sign * value for sign, value in found if value is not None]
    return fmean(values) if values else 0.0


def _column_mean(results: SuiteResults, column: str) -> float:
    values = [value for row in results.rows if (value := results.value(row.label, column)) is not None]
    return fmean(values) if values else nan


def _cells(results: SuiteResults, column: ColumnEntry) -> list[CellResult]:
    return [cell for row in results.rows if (cell := results.cell(row.label, column.name)) is not None]


def _of_seeds(label: str, values: Sequence[float], source: str = "") -> kinds.Estimate:
    found = summarize(list(values))
    return kinds.Estimate(label, found.mean, _end(found.low), _end(found.high), values, source)


def cost(results: SuiteResults) -> list[Picture]:
    """Wall time and memory of the runs, by row, for every group of runs; not where every row took the same."""
    found = []
    for group in _groups(results):
        column = group.columns[0].name
        runs = {name: results.runs_of(first, column) for first, name in _models(results, group).items()}
        found += _costs(group.title, runs)
    return found


def _costs(title: Callable[[str], str], runs: Mapping[str, Sequence[RunRecord]]) -> list[Picture]:
    found = []
    for what, unit, of in (("wall time of a run", "s", _seconds), ("largest memory of a run", "MB", _memory)):
        values = {label: [of(record) for record in each] for label, each in runs.items() if each}
        means = [fmean(each) for each in values.values()]
        if len(means) < 2 or max(means) - min(means) <= SAME * max(means):
            continue
        every = [kinds.Estimate(label, fmean(v), min(v), max(v), v) for label, v in values.items()]
        rows, said = ends(every, _value, "objectives")
        caption = (
            f"{title(what)}: mean, bar from least to most, on the machines named in the list of runs; compare rows "
        )
        chart = kinds.interval_chart(title(what), f"{what} ({unit})", rows, None)
        found += pictured(chart, f"{caption}of one machine only.", said)
    return found


def _seconds(record: RunRecord) -> float:
    return record.wall_seconds


def _memory(record: RunRecord) -> float:
    """MB on the GPU where there was one, else of the process."""
    return (record.peak_device_bytes or record.peak_memory_bytes) / 2**20


def _estimate(label: str, found: Interval, factor: float = 1.0) -> kinds.Estimate:
    return kinds.Estimate(label, factor * found.value, factor * _end(found.low), factor * _end(found.high))


def _end(value: float | None) -> float:
    """An end of an interval; nan where too few seeds give none."""
    return nan if value is None else value


@dataclass(frozen=True)
class Group:
    """Columns that are filled by the same runs: one set of pictures, named where a suite has several."""

    columns: tuple[ColumnEntry, ...]
    name: str

    def title(self, kind: str) -> str:
        return f"{self.name}: {kind}" if self.name else kind


def _groups(results: SuiteResults) -> list[Group]:
    hashes: dict[str, set[str]] = {column: set() for column in results.columns}
    for job in results.jobs:
        for cell in job.cells:
            hashes[cell.column].add(job.hash)
    groups: dict[frozenset[str], list[ColumnEntry]] = {}
    for column in results.manifest.columns:
        groups.setdefault(frozenset(hashes[column.name]), []).append(column)
    return [
        Group(tuple(c), _common_name([column.name for column in c]) if len(groups) > 1 else "") for c in groups.values()
    ]


def _models(results: SuiteResults, group: Group) -> dict[str, str]:
    """First row -> the names of all rows that are readings of the same runs."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in results.rows:
        hashes = tuple(record.hash for record in results.runs_of(row.label, group.columns[0].name))
        if hashes:
            rows.setdefault(hashes, []).append(row.label)
    return {labels[0]: ", ".join(labels) for labels in rows.values()}


def _common_name(names: Sequence[str]) -> str:
    """What all columns have before the colon ("digits: k-means", "digits: kNN": digits), else the first name."""
    starts = {name.partition(":")[0] for name in names}
    return starts.pop() if len(starts) == 1 else names[0]


def _read(results: SuiteResults, group: Group, runs: Beside) -> Mapping[str, list[dict[str, Curve]]]:
    found = {}
    for row in results.rows:
        names = _names(row, group.columns)
        read = [
            runs.curves(record.hash, names.values()) for record in results.runs_of(row.label, group.columns[0].name)
        ]
        found[row.label] = [{name: seed[own] for name, own in names.items() if own in seed} for seed in read]
    return found


def _names(row: RowEntry, columns: Iterable[ColumnEntry]) -> dict[str, str]:
    """By the name that a column has for all rows, the quantity of the row's runs."""
    names = {name: name for name in (LOSS, ENTROPY, ENTROPY_MAXIMUM, RANK)}
    for c in columns:
        names |= dict(zip(_logged(c.metric), _logged(c.metric_of(row)), strict=True))
    return names


def drawn_names(manifest: Manifest) -> set[str]:
    """Every quantity of metrics.jsonl of which a suite's pictures show a curve."""
    found = {name for row in manifest.rows for name in _names(row, manifest.columns).values()}
    return found if "curves" in manifest.show else found - {LOSS}


def _logged(metric: str) -> list[str]:
    """Names under which a metric of the record may stand in metrics.jsonl."""
    return [metric] if metric.startswith("diag/") else [f"eval/{metric}"]


def _lines(curves: Mapping[str, list[dict[str, Curve]]], name: str, factor: float = 1.0) -> list[kinds.Line]:
    lines = []
    for label, seeds in curves.items():
        present = [seed[name] for seed in seeds if name in seed]
        if present:
            lines.append(mean_line(label, present, factor))
    return [line for line in lines if len(line.x)]


def _curves(group: Group, curves: Mapping[str, list[dict[str, Curve]]], part: str) -> list[Picture]:
    found = []
    for column in group.columns:
        lines = [line for name in _logged(column.metric) for line in _lines(curves, name, column.factor)]
        if any(len(line.x) > 1 for line in lines):
            title = f"{column.name} while training"
            found += _lines_or_map(title, "training step", _named(column), lines, f"{title}, {part} part. {MEANS}")
    return found


def _paths(group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    """The second column over the first while training, a line for each row: mean over seeds at common steps."""
    if len(group.columns) < 2:
        return []
    first, second = group.columns[:2]
    (over,), (of,) = _logged(first.metric), _logged(second.metric)
    across = {line.label: line for line in _lines(curves, over, first.factor)}
    lines = []
    for line in _lines(curves, of, second.factor):
        at = dict(zip(across[line.label].x, across[line.label].y, strict=True)) if line.label in across else {}
        if found := [(at[step], y) for step, y in zip(line.x, line.y, strict=True) if step in at]:
            lines.append(kinds.Line(line.label, [x for x, _ in found], [y for _, y in found]))
    if not any(len(line.x) > 1 for line in lines):
        return []
    title = group.title(f"{second.name} over {first.name}")
    chart = kinds.line_chart(title, _named(first), _named(second), lines[:MOST_LINES])
    return pictured(chart, f"{title}, from step to step of training. Mean over seeds.", _left_out(lines))


def _named(column: ColumnEntry) -> str:
    return f"{column.name} ({column.unit})" if column.unit else column.name


def _losses(results: SuiteResults, group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    """The losses of a suite's models: of many those of the base and of the best by the group's first column."""
    column = group.columns[0]
    sign = -1 if column.higher_is_better else 1

    def place(model: tuple[str, str]) -> tuple[bool, float]:
        value = results.value(model[0], column.name)
        return model[0] != results.base, sign * value if value is not None else inf

    base = "the base and " if results.base else ""
    ordered = [name for _, name in sorted(_models(results, group).items(), key=place)]
    return loss_pictures(group, curves, ordered, f"{base}the best by the first column of its runs")


def loss_pictures(
    group: Group, curves: Mapping[str, list[dict[str, Curve]]], ordered: Sequence[str], chosen: str
) -> list[Picture]:
    """A picture per model: levels of different objectives have nothing to do with each other, and keep their axes."""
    lines = {line.label: line for line in _lines(curves, LOSS) if len(line.x) > 1}
    names = [name for name in ordered if name in lines]
    kept = set(names[:MOST_LINES])
    note = "Each on its own axis: levels of different objectives are not comparable."
    if len(lines) > len(kept):
        note += (
            f" {len(kept)} of {counted(len(lines), 'model')}: {chosen}. Every loss stands in metrics.jsonl of its run."
        )
    found = []
    for label, line in lines.items():
        if label in kept:
            title = group.title(f"training loss of {label}")
            chart = kinds.line_chart(title, "training step", "loss", [line])
            found += pictured(chart, f"{title}.", note)
    return found


MEANS = "Mean over seeds, band of one standard deviation."


def _lines_or_map(
    title: str, x_label: str, y_label: str, lines: Sequence[kinds.Line], caption: str, from_zero: bool = False
) -> list[Picture]:
    """Lines as long as they can be told apart, else a row of a heat map for each."""
    if len(lines) <= MOST_LINES:
        return pictured(kinds.line_chart(title, x_label, y_label, lines, from_zero), caption)
    steps = sorted({x for line in lines for x in line.x})
    shown, said = ends(lines, lambda line: line.y[-1] if line.y and isfinite(line.y[-1]) else 0.0, "rows")
    kept = set(steps[:: -(-len(steps) // MOST_STEPS)]) | {steps[-1]}
    tiles = [
        kinds.Tile(line.label, f"{x:g}", y)
        for x_kept in sorted(kept)
        for line in shown
        for x, y in zip(line.x, line.y, strict=True)
        if x == x_kept
    ]
    chart = kinds.heat_map(title, x_label, "", tiles, y_label)
    return pictured(chart, f"{title}: {counted(len(shown), 'row')}, the mean over seeds as colour.", said)


MOST_STEPS = 16


def _left_out(lines: Sequence[kinds.Line]) -> str:
    more = len(lines) - MOST_LINES
    return f"The first {MOST_LINES} of {counted(len(lines), 'row')}." if more > 0 else ""


def _is_shown(results: SuiteResults, kind: str, lines: Sequence[kinds.Line]) -> bool:
    """Asked for by the suite, or a curve: a single measurement stands in the table of diagnostics."""
    return bool(lines) and (kind in results.manifest.show or any(len(line.x) > 1 for line in lines))


def _ranks(results: SuiteResults, group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    lines = _lines(curves, RANK)
    if not _is_shown(results, "rank", lines):
        return []
    title = group.title("rank of the embeddings")
    caption = f"{title}: directions in which at most 2000 test embeddings spread."
    return _lines_or_map(title, "training step", "numerical rank (dimensions)", lines, caption, from_zero=True)


def _entropy(results: SuiteResults, group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    lines = _lines(curves, ENTROPY)
    if not _is_shown(results, "entropy", lines):
        return []
    tops = [line for line in _lines(curves, ENTROPY_MAXIMUM) if len(line.x)]
    if tops and len(lines) < MOST_LINES:
        longest = max(tops, key=lambda line: len(line.x))
        lines.append(kinds.Line("maximum (uniform weights)", longest.x, longest.y, is_reference=True))
    title = group.title("entropy of the negatives' weights")
    caption = f"{title}, on a training batch; higher means that the negatives are used more evenly."
    return _lines_or_map(title, "training step", "conditional entropy (nats)", lines, caption)


CLASSES = (("same", "same class"), ("different", "different class"), ("all", "all pairs"))
NEIGHBOURS = (("correct", "correct (positives)"), ("incorrect", "incorrect (negatives)"))


def _histograms(results: SuiteResults, group: Group) -> list[Picture]:
    """Distances by class, or of positives and negatives that the data name (`show` says "pairs").

    All models of a group have the same axes; many of them are the rows of one heat map for each part.
    """
    known = {"histogram": (CLASSES, "test embeddings"), "pairs": (NEIGHBOURS, "held-out anchors and candidates")}
    found = []
    for kind in (kind for kind in known if kind in results.manifest.show):
        parts, of = known[kind]
        models: dict[str, list[kinds.Steps]] = {}
        for first, name in _models(results, group).items():
            records = results.runs_of(first, group.columns[0].name)
            if series := _mean_histogram([record for record in records if record.histogram is not None], parts):
                models[name] = series
        if len(models) > MOST_HISTOGRAMS:
            found += _density_maps(group, models, of)
            continue
        top = max((h for series in models.values() for one in series for h in one.heights), default=0.0)
        for name, series in models.items():
            title = group.title(name)
            chart = kinds.histogram(title, DISTANCE, "density (1 / distance)", series, top)
            found += pictured(chart, f"{title} ({of})")
    return found


DISTANCE = "distance D = (1 - cosine) / 2"


def _density_maps(group: Group, models: Mapping[str, Sequence[kinds.Steps]], of: str) -> list[Picture]:
    found = []
    for part in dict.fromkeys(one.label for series in models.values() for one in series):
        every = [(name, one) for name, series in models.items() for one in series if one.label == part]
        shown, said = ends(every, lambda each: _middle(each[1]), "models, by mean distance")
        tiles = [kinds.Tile(name, f"{middle:.3g}", height) for name, one in shown for middle, height in _in_bins(one)]
        title = group.title(f"distances, {part}")
        chart = kinds.heat_map(title, DISTANCE, "", tiles, "density (1 / distance)")
        found += pictured(chart, f"{title} ({of}): a row for each of {counted(len(shown), 'model')}.", said)
    return found


MOST_BINS = 20


def _in_bins(one: kinds.Steps) -> list[tuple[float, float]]:
    """Middles and heights of at most MOST_BINS bins, neighbours together."""
    each = -(-len(one.heights) // MOST_BINS)
    found = []
    for start in range(0, len(one.heights), each):
        edges = one.edges[start : start + each + 1]
        mass = sum(h * (b - a) for h, (a, b) in zip(one.heights[start : start + each], pairwise(edges), strict=True))
        found.append(((edges[0] + edges[-1]) / 2, mass / (edges[-1] - edges[0])))
    return found


def _middle(one: kinds.Steps) -> float:
    """Mean of a density."""
    return sum(h * (b - a) * (a + b) / 2 for h, (a, b) in zip(one.heights, pairwise(one.edges), strict=True))


def _mean_histogram(records: Sequence[RunRecord], parts: Sequence[tuple[str, str]]) -> list[kinds.Steps]:
    """Mean over seeds of the density of pair distances, in parts; all pairs only where there is no other part."""
    series: list[kinds.Steps] = []
    for kind, label in parts:
        densities = []
        for record in records:
            assert record.histogram is not None
            counts, edges = getattr(record.histogram, kind), record.histogram.edges
            if counts and sum(counts) > 0 and edges == records[0].histogram.edges:  # type: ignore[union-attr]
                widths = [b - a for a, b in pairwise(edges)]
                total = sum(counts)
                densities.append([c / total / w for c, w in zip(counts, widths, strict=True)])
        if densities and (kind != "all" or not series):
            edges = records[0].histogram.edges  # type: ignore[union-attr]
            series.append(kinds.Steps(label, edges, [fmean(values) for values in zip(*densities, strict=True)]))
    return series


def _scatter(results: SuiteResults, runs: Beside) -> list[Picture]:
    """The points that planar runs leave in points.json: first seed of every cell."""
    if SCATTER not in results.manifest.show:
        return []
    found = []
    for column in results.columns:
        for row in results.rows:
            records = results.runs_of(row.label, column)
            points = _points(runs.points(records[0].hash)) if records else []
            chart = kinds.scatter_chart(f"{column}: {row.label}", "first coordinate", "second coordinate", points)
            if chart is not None:
                found.append(Picture(chart, f"{column}: {row.label} (seed {records[0].seed})"))
    return found


def _points(found: Any) -> list[kinds.Dots]:
    """Points of a run by class, of what points.json holds; none where that is something else."""
    try:
        rows = [(float(x), float(y), int(c)) for x, y, c in zip(found["x"], found["y"], found["label"], strict=True)]
    except (ValueError, TypeError, KeyError, OverflowError):
        return []
    classes = sorted({c for _, _, c in rows})
    return [
        kinds.Dots(f"class {c + 1}", [x for x, _, own in rows if own == c], [y for _, y, own in rows if own == c])
        for c in classes
    ]


def _columns(results: SuiteResults) -> list[Picture]:
    """A figure whose x axis are the columns: one line per row, at the numbers in the columns' names.

    Columns of different data, by what stands before the slash ("digits/blocks=2"), are pictures of their own.
    """
    found = []
    for part, names in groupby(results.columns, key=lambda name: name.rpartition("/")[0]):
        title = f"{results.manifest.title}: {part}" if part else results.manifest.title
        mean = f"{part}: mean" if part else "Mean"
        found += _column_pictures(results, title, list(names), f"{mean} over seeds, band of one standard deviation.")
    return found


def _column_pictures(results: SuiteResults, title: str, names: Sequence[str], caption: str) -> list[Picture]:
    numbers = [_number_in(name) for name in names]
    known = [n for n in numbers if n is not None]
    xs = known if len(known) == len(numbers) else [float(i) for i in range(len(numbers))]
    lines = []
    for row in results.rows:
        cells = [results.cell(row.label, name) for name in names]
        values = [c.summary.mean if c and c.summary else nan for c in cells]
        spread = [c.summary.std if c and c.summary else nan for c in cells]
        if any(v == v for v in values):
            low = [v - s for v, s in zip(values, spread, strict=True)]
            high = [v + s for v, s in zip(values, spread, strict=True)]
            lines.append(kinds.Line(row.label, xs, values, low, high))
    return _lines_or_map(title, results.manifest.x_label, results.manifest.y_label, lines, caption)


def _number_in(name: str) -> float | None:
    try:
        return float(name.rpartition("=")[2])
    except ValueError:
        return None


def other_runs(groups: Mapping[str, Sequence[RunRecord]], runs: Path | Beside) -> dict[str, list[Picture]]:
    """Runs outside suites: their results, curves and cost by objective, for every task that has several runs."""
    runs = Beside.of(runs)
    found: dict[str, list[Picture]] = {"Comparison": [], "Learning curves": [], "Training loss": [], "Cost": []}
    for task, records in groups.items():
        by: dict[str, list[RunRecord]] = {}
        for record in records:
            by.setdefault(record.objective, []).append(record)
        metrics = dict.fromkeys(name for record in records for name in record.results)
        for metric in metrics:
            values = {label: [v for r in each if (v := measure(r, metric)) is not None] for label, each in by.items()}
            rows = [_of_seeds(label, each) for label, each in values.items() if each]
            if len(rows) > 1:
                shown, said = ends(rows, _value, "objectives")
                chart = kinds.interval_chart(f"{task}: {metric}", metric, shown, None)
                caption = f"{task}: {metric}. Mean, {INTERVAL}, small dots the runs."
                found["Comparison"] += pictured(chart, caption, said)
        names = [LOSS, *(name for metric in metrics for name in _logged(metric))]
        read = {o: [runs.curves(r.hash, names) for r in each] for o, each in by.items()}
        for name in names[1:]:
            lines = _lines(read, name)
            if any(len(line.x) > 1 for line in lines):
                title = f"{task}: {name.removeprefix('eval/')} while training"
                caption = f"{title}, {curves_on(records)} part. {MEANS}"
                pictures = _lines_or_map(title, "training step", name.removeprefix("eval/"), lines, caption)
                found["Learning curves"] += pictures
        often = sorted(read, key=lambda objective: -len(by[objective]))
        found["Training loss"] += loss_pictures(Group((), task), read, often, "those with most runs")
        found["Cost"] += _costs(Group((), task).title, by)
    return {name: shown for name, shown in found.items() if shown}
