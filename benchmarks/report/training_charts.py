"""Pictures of what runs logged and left behind: learning curves, losses, ranks, entropies, distances, points."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from dipole.benchmarks.manifest import ColumnEntry, Manifest, RowEntry
from dipole.benchmarks.report.chart import MOST_LINES, Picture, ends, pictured
from dipole.benchmarks.report.chart_types import Line, Points, Tile, heat_map, histogram, line_chart, scatter_chart
from dipole.benchmarks.results_file import Curve, RunFiles
from dipole.benchmarks.suite_results import SuiteResults, curves_on
from dipole.core.record import RunRecord
from dipole.core.utils.text import counted

ENTROPY, ENTROPY_MAXIMUM = "diag/conditional_entropy", "diag/conditional_entropy_maximum"
RANK = "diag/rank"
LOSS = "train/loss"
SCATTER = "scatter"  # in `show` of a suite whose runs leave points
MOST_STEPS = 16  # columns of a heat map of curves
MEANS = "Mean over seeds, band of one standard deviation."
STEP = "training step"
CLASSES = {"same": "same class", "different": "different class", "all": "all pairs"}
NEIGHBOURS = {"correct": "correct (positives)", "incorrect": "incorrect (negatives)"}

Curves = Mapping[str, list[dict[str, Curve]]]  # by row, the curves of each seed by name


@dataclass(frozen=True)
class Group:
    """Columns that are filled by the same runs: one set of pictures, with a name if a suite has several."""

    columns: tuple[ColumnEntry, ...]
    name: str

    def title(self, kind: str) -> str:
        return f"{self.name}: {kind}" if self.name else kind


def groups_of(results: SuiteResults) -> list[Group]:
    """Return the columns of a suite, grouped by the runs that fill them.

    A group's name is what its columns have before the colon ("digits: k-means", "digits: kNN": digits).
    """
    groups: dict[str, list[ColumnEntry]] = {}
    for column in results.manifest.columns:
        groups.setdefault(results.run_groups[column.name], []).append(column)
    found = []
    for columns in groups.values():
        name, starts = columns[0].name, {column.name.partition(":")[0] for column in columns}
        if len(groups) == 1:
            name = ""
        elif len(starts) == 1:
            name = starts.pop()
        found.append(Group(tuple(columns), name))
    return found


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
    show, found = results.manifest.show, {"Embedded points": _scatter(results, runs)}
    kinds = "Learning curves", "Training loss", "Distance histograms", "Conditional entropy", "Rank of the embeddings"
    found |= {kind: [] for kind in kinds}
    measured_on = curves_on(record for record in results.records.values() if record.status == "done")
    for group in groups_of(results):
        lines = _read(results, group, runs)
        models = {name: lines[first] for first, name in models_of(results, group).items()}
        if "curves" in show:
            for column in group.columns:
                own = lines_of(lines, logged_name(column.metric), column.factor)
                found["Learning curves"] += learning_curves(column.name, column.label, own, measured_on)
            found["Training loss"] += _losses(results, group, models)
        if "paths" in show:
            found["Learning curves"] += paths(group, lines)
        found["Distance histograms"] += _histograms(results, group)
        found["Conditional entropy"] += _entropy(results, group, models)
        found["Rank of the embeddings"] += _ranks(results, group, models)
    return found


def drawn_names(manifest: Manifest) -> set[str]:
    """Return every quantity of metrics.jsonl of which a suite's pictures show a curve."""
    found = {name for row in manifest.rows for name in _names(row, manifest.columns).values()}
    if "curves" not in manifest.show:
        found.remove(LOSS)
    return found


def logged_name(metric: str) -> str:
    """Return the name that a metric of the record has in metrics.jsonl."""
    return metric if metric.startswith("diag/") else f"eval/{metric}"


def _names(row: RowEntry, columns: Iterable[ColumnEntry]) -> dict[str, str]:
    """Return, by the name that a column has for all rows, the quantity of the row's runs."""
    names = {name: name for name in (LOSS, ENTROPY, ENTROPY_MAXIMUM, RANK)}
    return names | {logged_name(c.metric): logged_name(c.metric_of(row)) for c in columns}


def _read(results: SuiteResults, group: Group, runs: RunFiles) -> Curves:
    found: dict[str, list[dict[str, Curve]]] = {}
    for row in results.rows:
        names = _names(row, group.columns)
        found[row.label] = []
        for record in results.runs_of(row.label, group.columns[0].name):
            seed = runs.curves(record.hash, names.values())
            found[row.label].append({name: seed[own] for name, own in names.items() if own in seed})
    return found


def mean_line(label: str, curves: Sequence[Curve], factor: float = 1.0) -> Line:
    """Return the mean over runs, with a band of one standard deviation if there are two or more.

    The steps are those that any run has within the range that all runs have. Between its steps a run is linear. Of a
    step that it has twice (a resumed run), the later value counts.
    """
    known = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves if curve.steps]
    if not known:
        return Line(label, [], [])
    first, last = max(map(min, known)), min(map(max, known))
    steps = sorted({step for curve in known for step in curve if first <= step <= last})
    values = factor * np.array([np.interp(steps, sorted(curve), [curve[s] for s in sorted(curve)]) for curve in known])
    means = values.mean(axis=0)
    if len(known) < 2:
        return Line(label, steps, means.tolist())
    spread = values.std(axis=0, ddof=1)
    return Line(label, steps, means.tolist(), (means - spread).tolist(), (means + spread).tolist())


def lines_of(curves: Curves, name: str, factor: float = 1.0) -> list[Line]:
    """Return the mean line of one quantity for each row that has it."""
    lines = [mean_line(label, [run[name] for run in runs if name in run], factor) for label, runs in curves.items()]
    return [line for line in lines if line.x]


def _has_curve(lines: Sequence[Line]) -> bool:
    return any(len(line.x) > 1 for line in lines)


def lines_or_map(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], caption: str, from_zero: bool = False
) -> list[Picture]:
    """Return lines, or a heat map with a row for each if there are too many."""
    if len(lines) <= MOST_LINES:
        return pictured(line_chart(title, x_label, y_label, lines, from_zero), caption)
    steps = sorted({x for line in lines for x in line.x})
    last = {line.label: [y for y in line.y[-1:] if isfinite(y)] or [0.0] for line in lines}
    shown, note = ends(lines, lambda line: last[line.label][0], "rows")
    tiles = []
    for step in sorted({*steps[:: -(-len(steps) // MOST_STEPS)], steps[-1]}):
        for line in shown:
            tiles += [Tile(line.label, f"{x:g}", y) for x, y in zip(line.x, line.y, strict=True) if x == step]
    chart = heat_map(title, x_label, "", tiles, y_label)
    return pictured(chart, f"{title}: {counted(len(shown), 'row')}, the mean over seeds as colour.", note)


def learning_curves(name: str, label: str, lines: Sequence[Line], part: str) -> list[Picture]:
    """Return the picture of one measurement while training, if it was measured more than once."""
    if not _has_curve(lines):
        return []
    title = f"{name} while training"
    return lines_or_map(title, STEP, label, lines, f"{title}, {part} part. {MEANS}")


def paths(group: Group, curves: Curves) -> list[Picture]:
    """The second column over the first while training, a line for each row: mean over seeds at common steps."""
    if len(group.columns) < 2:
        return []
    first, second = group.columns[:2]
    across = {line.label: line for line in lines_of(curves, logged_name(first.metric), first.factor)}
    lines = []
    for line in lines_of(curves, logged_name(second.metric), second.factor):
        over = across.get(line.label, Line("", [], []))
        at = dict(zip(over.x, over.y, strict=True))
        points = [(at[step], y) for step, y in zip(line.x, line.y, strict=True) if step in at]
        lines.append(Line(line.label, [x for x, _ in points], [y for _, y in points]))
    if not _has_curve(lines):
        return []
    title, note = group.title(f"{second.name} over {first.name}"), ""
    if len(lines) > MOST_LINES:
        note = f"The first {MOST_LINES} of {counted(len(lines), 'row')}."
    chart = line_chart(title, first.label, second.label, lines[:MOST_LINES])
    return pictured(chart, f"{title}, from step to step of training. Mean over seeds.", note)


def _losses(results: SuiteResults, group: Group, curves: Curves) -> list[Picture]:
    """The losses of a suite's models. Of many models: the base and the best by the group's first column."""
    column = group.columns[0]

    def place(label: str) -> tuple[bool, bool, float]:
        value = results.value(label, column.name)
        return label != results.base, value is None, -column.sign * (value or 0.0)

    chosen = "the best by the first column of its runs"
    if results.base:
        chosen = f"the base and {chosen}"
    models = models_of(results, group)
    return loss_pictures(group.title, curves, [models[label] for label in sorted(models, key=place)], chosen)


def loss_pictures(title_of: Callable[[str], str], curves: Curves, ordered: Sequence[str], chosen: str) -> list[Picture]:
    """Return a picture per model, each with its own axis: levels of different objectives are not comparable."""
    lines = {line.label: line for line in lines_of(curves, LOSS) if len(line.x) > 1}
    kept = [name for name in ordered if name in lines][:MOST_LINES]
    note = "Each on its own axis: levels of different objectives are not comparable."
    if len(lines) > len(kept):
        note += f" {len(kept)} of {counted(len(lines), 'model')}: {chosen}. The metrics.jsonl of each run has its loss."
    found = []
    for label, line in lines.items():
        if label in kept:
            title = title_of(f"training loss of {label}")
            found += pictured(line_chart(title, STEP, "loss", [line]), f"{title}.", note)
    return found


def _is_shown(results: SuiteResults, kind: str, lines: Sequence[Line]) -> bool:
    """True if the suite asks for it or it is a curve: single measurements are in the table of diagnostics."""
    return bool(lines) and (kind in results.manifest.show or _has_curve(lines))


def _ranks(results: SuiteResults, group: Group, curves: Curves) -> list[Picture]:
    lines = lines_of(curves, RANK)
    if not _is_shown(results, "rank", lines):
        return []
    title = group.title("rank of the embeddings")
    caption = f"{title}: directions in which at most 2000 test embeddings spread."
    return lines_or_map(title, STEP, "numerical rank (dimensions)", lines, caption, from_zero=True)


def _entropy(results: SuiteResults, group: Group, curves: Curves) -> list[Picture]:
    lines, maxima = lines_of(curves, ENTROPY), lines_of(curves, ENTROPY_MAXIMUM)
    if not _is_shown(results, "entropy", lines):
        return []
    if maxima and len(lines) < MOST_LINES:
        longest = max(maxima, key=lambda line: len(line.x))
        lines.append(Line("maximum (uniform weights)", longest.x, longest.y, is_reference=True))
    title = group.title("entropy of the negatives' weights")
    caption = f"{title}, on a training batch. Higher means that the negatives are used more evenly."
    return lines_or_map(title, STEP, "conditional entropy (nats)", lines, caption)


def _histograms(results: SuiteResults, group: Group) -> list[Picture]:
    """Draw distances by class, or of named positives and negatives ("pairs" in `show`), a group on the same axes."""
    known = {"histogram": (CLASSES, "test embeddings"), "pairs": (NEIGHBOURS, "held-out anchors and candidates")}
    found = []
    for kind, (parts, of) in known.items():
        if kind not in results.manifest.show:
            continue
        models = {}
        for first, name in models_of(results, group).items():
            models[name] = _densities(results.runs_of(first, group.columns[0].name), parts)
        heights = [h for _, densities in models.values() for each in densities.values() for h in each]
        for name, (edges, densities) in models.items():
            title, axes = group.title(name), ("distance D = (1 - cosine) / 2", "density (1 / distance)")
            chart = histogram(title, *axes, edges, densities, max(heights, default=0.0))
            found += pictured(chart, f"{title} ({of})")
    return found


def _densities(records: Sequence[RunRecord], parts: Mapping[str, str]) -> tuple[list[float], dict[str, list[float]]]:
    """Return edges and the mean density over seeds of each part of the pairs. "all" only if there is no other part."""
    known = [record.histogram for record in records if record.histogram is not None]
    densities: dict[str, list[float]] = {}
    if not known:
        return [], densities
    edges = known[0].edges
    widths = [b - a for a, b in pairwise(edges)]
    for kind, label in parts.items():
        counts = [getattr(found, kind) for found in known if found.edges == edges]
        shares = [np.array(each) / sum(each) for each in counts if each and sum(each) > 0]
        if shares and (kind != "all" or not densities):
            densities[label] = (np.mean(shares, axis=0) / widths).tolist()
    return edges, densities


def _scatter(results: SuiteResults, runs: RunFiles) -> list[Picture]:
    """The points that planar runs leave in points.json: first seed of every cell."""
    if SCATTER not in results.manifest.show:
        return []
    found = []
    for column in results.columns:
        for row in results.rows:
            for record in results.runs_of(row.label, column)[:1]:
                title, points = f"{column}: {row.label}", _points(runs.points(record.hash))
                chart = scatter_chart(title, "first coordinate", "second coordinate", points)
                found += pictured(chart, f"{title} (seed {record.seed})")
    return found


def _points(found: Any) -> dict[str, Points]:
    """Points of a run by class, none if points.json holds something else."""
    try:
        rows = [(float(x), float(y), int(c)) for x, y, c in zip(found["x"], found["y"], found["label"], strict=True)]
    except (ValueError, TypeError, KeyError, OverflowError):
        return {}
    labels = sorted({label for _, _, label in rows})
    return {f"class {label + 1}": [(x, y) for x, y, c in rows if c == label] for label in labels}
