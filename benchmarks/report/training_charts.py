"""Pictures of what runs logged and left behind: learning curves, losses, ranks, entropies, distances, points."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from statistics import fmean, stdev
from typing import Any

import numpy as np

from dipole.benchmarks.manifest import ColumnEntry, Manifest, RowEntry
from dipole.benchmarks.report.curve_charts import Dots, Line, Steps, histogram, line_chart, scatter_chart
from dipole.benchmarks.report.curves import Curve
from dipole.benchmarks.report.picture import MOST_LINES, Picture, ends, pictured
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.report.row_charts import Tile, heat_map
from dipole.benchmarks.report.run_files import RunFiles
from dipole.core.record import RunRecord
from dipole.core.utils.text import counted

ENTROPY, ENTROPY_MAXIMUM = "diag/conditional_entropy", "diag/conditional_entropy_maximum"
RANK = "diag/rank"
LOSS = "train/loss"
SCATTER = "scatter"
"""In `show` of a suite whose runs leave points."""
MOST_HISTOGRAMS = 6
"""More histograms than this are compared as rows of a heat map."""
MOST_STEPS, MOST_BINS = 16, 20
"""Columns of a heat map of curves, and of densities."""
MEANS = "Mean over seeds, band of one standard deviation."
DISTANCE = "distance D = (1 - cosine) / 2"
CLASSES = (("same", "same class"), ("different", "different class"), ("all", "all pairs"))
NEIGHBOURS = (("correct", "correct (positives)"), ("incorrect", "incorrect (negatives)"))

Curves = Mapping[str, list[dict[str, Curve]]]
"""By row, the curves of each seed by name."""


@dataclass(frozen=True)
class Group:
    """Columns that are filled by the same runs: one set of pictures, with a name if a suite has several."""

    columns: tuple[ColumnEntry, ...]
    name: str

    def title(self, kind: str) -> str:
        if self.name:
            return f"{self.name}: {kind}"
        return kind


def groups_of(results: SuiteResults) -> list[Group]:
    """Return the columns of a suite, grouped by the runs that fill them."""
    hashes: dict[str, set[str]] = {column: set() for column in results.columns}
    for job in results.jobs:
        for cell in job.cells:
            hashes[cell.column].add(job.hash)
    groups: dict[frozenset[str], list[ColumnEntry]] = {}
    for column in results.manifest.columns:
        groups.setdefault(frozenset(hashes[column.name]), []).append(column)
    if len(groups) == 1:
        return [Group(tuple(columns), "") for columns in groups.values()]
    return [Group(tuple(columns), _common_name(columns)) for columns in groups.values()]


def _common_name(columns: Sequence[ColumnEntry]) -> str:
    """Return what all columns have before the colon ("digits: k-means", "digits: kNN": digits), or the first name."""
    starts = {column.name.partition(":")[0] for column in columns}
    if len(starts) == 1:
        return starts.pop()
    return columns[0].name


def models_of(results: SuiteResults, group: Group) -> dict[str, str]:
    """Return, by the first row, the names of all rows that are measured on the same runs."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in results.rows:
        hashes = tuple(record.hash for record in results.runs_of(row.label, group.columns[0].name))
        if hashes:
            rows.setdefault(hashes, []).append(row.label)
    return {labels[0]: ", ".join(labels) for labels in rows.values()}


def training_pictures(results: SuiteResults, runs: RunFiles) -> dict[str, list[Picture]]:
    """Return the pictures of a suite's runs by kind, in the order of the report."""
    curves, losses, entropy, ranks, histograms = [], [], [], [], []
    show = results.manifest.show
    for group in groups_of(results):
        lines = _read(results, group, runs)
        models = {name: lines[first] for first, name in models_of(results, group).items()}
        if "curves" in show:
            curves += _curves(group, lines, results.curves_on)
            losses += _losses(results, group, models)
        if "paths" in show:
            curves += _paths(group, lines)
        entropy += _entropy(results, group, models)
        ranks += _ranks(results, group, models)
        histograms += _histograms(results, group)
    return {
        "Embedded points": _scatter(results, runs),
        "Learning curves": curves,
        "Training loss": losses,
        "Distance histograms": histograms,
        "Conditional entropy": entropy,
        "Rank of the embeddings": ranks,
    }


def drawn_names(manifest: Manifest) -> set[str]:
    """Return every quantity of metrics.jsonl of which a suite's pictures show a curve."""
    found = {name for row in manifest.rows for name in _names(row, manifest.columns).values()}
    if "curves" not in manifest.show:
        found.remove(LOSS)
    return found


def logged_name(metric: str) -> str:
    """Return the name that a metric of the record has in metrics.jsonl."""
    if metric.startswith("diag/"):
        return metric
    return f"eval/{metric}"


def _names(row: RowEntry, columns: Iterable[ColumnEntry]) -> dict[str, str]:
    """Return, by the name that a column has for all rows, the quantity of the row's runs."""
    names = {name: name for name in (LOSS, ENTROPY, ENTROPY_MAXIMUM, RANK)}
    return names | {logged_name(c.metric): logged_name(c.metric_of(row)) for c in columns}


def _read(results: SuiteResults, group: Group, runs: RunFiles) -> Curves:
    found = {}
    for row in results.rows:
        names = _names(row, group.columns)
        read = [
            runs.curves(record.hash, names.values()) for record in results.runs_of(row.label, group.columns[0].name)
        ]
        found[row.label] = [{name: seed[own] for name, own in names.items() if own in seed} for seed in read]
    return found


def mean_line(label: str, curves: Sequence[Curve], factor: float = 1.0) -> Line:
    """Return the mean over runs, with a band of one standard deviation if there are two or more.

    The steps are those that any run has within the range that all runs have. Between its steps a run is linear.
    """
    curves = [curve for curve in curves if curve.steps]
    if not curves:
        return Line(label, [], [])
    first, last = max(min(curve.steps) for curve in curves), min(max(curve.steps) for curve in curves)
    steps = sorted({step for curve in curves for step in curve.steps if first <= step <= last})
    rows = [_at(curve, steps) for curve in curves]
    values = [[factor * value for value in column] for column in zip(*rows, strict=True)]
    means = [fmean(v) for v in values]
    if len(curves) < 2:
        return Line(label, steps, means)
    spread = [stdev(v) for v in values]
    low = [m - s for m, s in zip(means, spread, strict=True)]
    high = [m + s for m, s in zip(means, spread, strict=True)]
    return Line(label, steps, means, low, high)


def _at(curve: Curve, steps: Sequence[float]) -> list[float]:
    """Values of a curve at steps within its range. Of a step that it has twice (a resumed run), the later one."""
    known = dict(zip(curve.steps, curve.values, strict=True))
    own = sorted(known)
    return [float(value) for value in np.interp(steps, own, [known[step] for step in own])]


def lines_of(curves: Curves, name: str, factor: float = 1.0) -> list[Line]:
    """Return the mean line of one quantity for each row that has it."""
    lines = []
    for label, seeds in curves.items():
        present = [seed[name] for seed in seeds if name in seed]
        if present:
            lines.append(mean_line(label, present, factor))
    return [line for line in lines if len(line.x)]


def lines_or_map(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], caption: str, from_zero: bool = False
) -> list[Picture]:
    """Return lines, or a heat map with a row for each if there are too many."""
    if len(lines) <= MOST_LINES:
        return pictured(line_chart(title, x_label, y_label, lines, from_zero), caption)
    steps = sorted({x for line in lines for x in line.x})
    last = {line.label: [y for y in line.y[-1:] if isfinite(y)] or [0.0] for line in lines}
    shown, note = ends(lines, lambda line: last[line.label][0], "rows")
    kept = sorted({*steps[:: -(-len(steps) // MOST_STEPS)], steps[-1]})
    tiles = []
    for step in kept:
        for line in shown:
            tiles += [Tile(line.label, f"{x:g}", y) for x, y in zip(line.x, line.y, strict=True) if x == step]
    chart = heat_map(title, x_label, "", tiles, y_label)
    return pictured(chart, f"{title}: {counted(len(shown), 'row')}, the mean over seeds as colour.", note)


def _curves(group: Group, curves: Curves, part: str) -> list[Picture]:
    found = []
    for column in group.columns:
        lines = lines_of(curves, logged_name(column.metric), column.factor)
        if any(len(line.x) > 1 for line in lines):
            title = f"{column.name} while training"
            caption = f"{title}, {part} part. {MEANS}"
            found += lines_or_map(title, "training step", column.label, lines, caption)
    return found


def _paths(group: Group, curves: Curves) -> list[Picture]:
    """The second column over the first while training, a line for each row: mean over seeds at common steps."""
    if len(group.columns) < 2:
        return []
    first, second = group.columns[:2]
    across = {line.label: line for line in lines_of(curves, logged_name(first.metric), first.factor)}
    lines = []
    for line in lines_of(curves, logged_name(second.metric), second.factor):
        if line.label not in across:
            continue
        at = dict(zip(across[line.label].x, across[line.label].y, strict=True))
        points = [(at[step], y) for step, y in zip(line.x, line.y, strict=True) if step in at]
        if points:
            lines.append(Line(line.label, [x for x, _ in points], [y for _, y in points]))
    if not any(len(line.x) > 1 for line in lines):
        return []
    title = group.title(f"{second.name} over {first.name}")
    chart = line_chart(title, first.label, second.label, lines[:MOST_LINES])
    note = ""
    if len(lines) > MOST_LINES:
        note = f"The first {MOST_LINES} of {counted(len(lines), 'row')}."
    return pictured(chart, f"{title}, from step to step of training. Mean over seeds.", note)


def _losses(results: SuiteResults, group: Group, curves: Curves) -> list[Picture]:
    """The losses of a suite's models. Of many models: the base and the best by the group's first column."""
    column = group.columns[0]

    def place(model: tuple[str, str]) -> tuple[bool, float]:
        value = results.value(model[0], column.name)
        if value is None:
            return model[0] != results.base, inf
        return model[0] != results.base, -column.sign * value

    base = ""
    if results.base:
        base = "the base and "
    ordered = [name for _, name in sorted(models_of(results, group).items(), key=place)]
    return loss_pictures(group.title, curves, ordered, f"{base}the best by the first column of its runs")


def loss_pictures(title_of: Callable[[str], str], curves: Curves, ordered: Sequence[str], chosen: str) -> list[Picture]:
    """Return a picture per model, each with its own axis: levels of different objectives are not comparable."""
    lines = {line.label: line for line in lines_of(curves, LOSS) if len(line.x) > 1}
    kept = set([name for name in ordered if name in lines][:MOST_LINES])
    note = "Each on its own axis: levels of different objectives are not comparable."
    if len(lines) > len(kept):
        note += f" {len(kept)} of {counted(len(lines), 'model')}: {chosen}. The metrics.jsonl of each run has its loss."
    found = []
    for label, line in lines.items():
        if label in kept:
            title = title_of(f"training loss of {label}")
            found += pictured(line_chart(title, "training step", "loss", [line]), f"{title}.", note)
    return found


def _is_shown(results: SuiteResults, kind: str, lines: Sequence[Line]) -> bool:
    """True if the suite asks for it or it is a curve: single measurements are in the table of diagnostics."""
    return bool(lines) and (kind in results.manifest.show or any(len(line.x) > 1 for line in lines))


def _ranks(results: SuiteResults, group: Group, curves: Curves) -> list[Picture]:
    lines = lines_of(curves, RANK)
    if not _is_shown(results, "rank", lines):
        return []
    title = group.title("rank of the embeddings")
    caption = f"{title}: directions in which at most 2000 test embeddings spread."
    return lines_or_map(title, "training step", "numerical rank (dimensions)", lines, caption, from_zero=True)


def _entropy(results: SuiteResults, group: Group, curves: Curves) -> list[Picture]:
    lines = lines_of(curves, ENTROPY)
    if not _is_shown(results, "entropy", lines):
        return []
    maxima = lines_of(curves, ENTROPY_MAXIMUM)
    if maxima and len(lines) < MOST_LINES:
        longest = max(maxima, key=lambda line: len(line.x))
        lines.append(Line("maximum (uniform weights)", longest.x, longest.y, is_reference=True))
    title = group.title("entropy of the negatives' weights")
    caption = f"{title}, on a training batch. Higher means that the negatives are used more evenly."
    return lines_or_map(title, "training step", "conditional entropy (nats)", lines, caption)


def _histograms(results: SuiteResults, group: Group) -> list[Picture]:
    """Distances by class, or of positives and negatives that the data name (`show` says "pairs").

    All models of a group have the same axes. Many models are rows of one heat map for each part.
    """
    known = {"histogram": (CLASSES, "test embeddings"), "pairs": (NEIGHBOURS, "held-out anchors and candidates")}
    found = []
    for kind, (parts, of) in known.items():
        if kind not in results.manifest.show:
            continue
        models: dict[str, list[Steps]] = {}
        for first, name in models_of(results, group).items():
            if series := _mean_histogram(results.runs_of(first, group.columns[0].name), parts):
                models[name] = series
        if len(models) > MOST_HISTOGRAMS:
            found += _density_maps(group, models, of)
            continue
        top = max((h for series in models.values() for one in series for h in one.heights), default=0.0)
        for name, series in models.items():
            title = group.title(name)
            chart = histogram(title, DISTANCE, "density (1 / distance)", series, top)
            found += pictured(chart, f"{title} ({of})")
    return found


def _density_maps(group: Group, models: Mapping[str, Sequence[Steps]], of: str) -> list[Picture]:
    found = []
    for part in dict.fromkeys(one.label for series in models.values() for one in series):
        every = [(name, one) for name, series in models.items() for one in series if one.label == part]
        shown, note = ends(every, lambda each: _mean_of(each[1]), "models, by mean distance")
        tiles = [Tile(name, f"{middle:.3g}", height) for name, one in shown for middle, height in _in_bins(one)]
        title = group.title(f"distances, {part}")
        chart = heat_map(title, DISTANCE, "", tiles, "density (1 / distance)")
        found += pictured(chart, f"{title} ({of}): a row for each of {counted(len(shown), 'model')}.", note)
    return found


def _in_bins(one: Steps) -> list[tuple[float, float]]:
    """Middles and heights of at most MOST_BINS bins, neighbours merged."""
    each = -(-len(one.heights) // MOST_BINS)
    found = []
    for start in range(0, len(one.heights), each):
        edges = one.edges[start : start + each + 1]
        mass = sum(h * (b - a) for h, (a, b) in zip(one.heights[start : start + each], pairwise(edges), strict=True))
        found.append(((edges[0] + edges[-1]) / 2, mass / (edges[-1] - edges[0])))
    return found


def _mean_of(one: Steps) -> float:
    """Mean of a density."""
    return sum(h * (b - a) * (a + b) / 2 for h, (a, b) in zip(one.heights, pairwise(one.edges), strict=True))


def _mean_histogram(records: Sequence[RunRecord], parts: Sequence[tuple[str, str]]) -> list[Steps]:
    """Mean over seeds of the density of pair distances, in parts. "all" only if there is no other part."""
    known = [record.histogram for record in records if record.histogram is not None]
    series: list[Steps] = []
    for kind, label in parts:
        edges = known[0].edges if known else []
        densities = []
        for found in known:
            counts = getattr(found, kind)
            if counts and sum(counts) > 0 and found.edges == edges:
                total = sum(counts)
                densities.append([c / total / (b - a) for c, (a, b) in zip(counts, pairwise(edges), strict=True)])
        if densities and (kind != "all" or not series):
            series.append(Steps(label, edges, [fmean(values) for values in zip(*densities, strict=True)]))
    return series


def _scatter(results: SuiteResults, runs: RunFiles) -> list[Picture]:
    """The points that planar runs leave in points.json: first seed of every cell."""
    if SCATTER not in results.manifest.show:
        return []
    found = []
    for column in results.columns:
        for row in results.rows:
            records = results.runs_of(row.label, column)
            if not records:
                continue
            title = f"{column}: {row.label}"
            chart = scatter_chart(title, "first coordinate", "second coordinate", _points(runs.points(records[0].hash)))
            found += pictured(chart, f"{title} (seed {records[0].seed})")
    return found


def _points(found: Any) -> list[Dots]:
    """Points of a run by class, none if points.json holds something else."""
    try:
        rows = [(float(x), float(y), int(c)) for x, y, c in zip(found["x"], found["y"], found["label"], strict=True)]
    except (ValueError, TypeError, KeyError, OverflowError):
        return []
    dots = []
    for label in sorted({c for _, _, c in rows}):
        own = [(x, y) for x, y, c in rows if c == label]
        dots.append(Dots(f"class {label + 1}", [x for x, _ in own], [y for _, y in own]))
    return dots
