"""The pictures of a suite: learning curves, distance histograms by class, entropy, columns as a curve, cost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import nan
from pathlib import Path
from statistics import fmean

from dipole.benchmarks.manifest import ColumnEntry
from dipole.benchmarks.report import svg
from dipole.benchmarks.report.curves import Curve, mean_line, read_curves
from dipole.benchmarks.report.ranking import Rank
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.statistics import Interval
from dipole.core.record import RunRecord

ENTROPY, ENTROPY_MAXIMUM = "diag/conditional_entropy", "diag/conditional_entropy_maximum"
RANK = "diag/rank"
LOSS = "train/loss"
INTERVAL = "estimate and 95 % interval"


@dataclass(frozen=True)
class Picture:
    """A chart and the sentence below it."""

    svg: str
    caption: str


def pictures(results: SuiteResults, runs: Path) -> dict[str, list[Picture]]:
    """All pictures of a suite by kind, in the order of the report; kinds without data are absent."""
    found: dict[str, list[Picture]] = {}
    if results.manifest.kind == "figure" and "columns" in results.manifest.show:
        found["Measurements"] = _columns(results)
    curves, entropy, ranks, histograms = [], [], [], []
    for group in _groups(results):
        lines = _read(results, group, runs)
        models = {name: lines[first] for first, name in _models(results, group).items()}
        if "curves" in results.manifest.show:
            curves += [*_curves(group, lines), *_losses(group, models)]
        if "paths" in results.manifest.show:
            curves += _paths(group, lines)
        entropy += _entropy(results, group, models)
        ranks += _ranks(results, group, models)
        histograms += _histograms(results, group)
    found["Embedded points"] = _scatter(results, runs)
    found["Learning curves"] = curves
    found["Distance histograms"] = histograms
    found["Conditional entropy"] = entropy
    found["Rank of the embeddings"] = ranks
    return {name: shown for name, shown in found.items() if shown}


def ranking(title: str, ranks: Sequence[Rank], base: str) -> list[Picture]:
    """Probability of improvement and relative gain over the base, with intervals."""
    rows = [r for r in ranks if r.improvement is not None]
    if not rows:
        return []
    beats = [_estimate(r.label, r.improvement) for r in rows if r.improvement is not None]
    gains = [_estimate(r.label, r.gain, 100.0) for r in rows if r.gain is not None]
    probability = svg.interval_chart(
        f"{title}: probability of improvement",
        "P(a run beats a run of the base), mean over tasks",
        beats,
        INTERVAL,
        reference=0.5,
    )
    gain = svg.interval_chart(f"{title}: gain", "gain over the base (% of its mean)", gains, INTERVAL)
    pair = [
        Picture(probability, f"Against {base}; one half means no difference. Bootstrap: runs redrawn in every task."),
        Picture(gain, f"Against {base}: interquartile mean over all runs of all tasks, stratified bootstrap."),
    ]
    return [picture for picture in pair if picture.svg]


def cost(results: SuiteResults) -> list[Picture]:
    """Wall time and memory of the runs, by row, for every group of runs."""
    found = []
    for group in _groups(results):
        column = group.columns[0].name
        runs = {name: results.runs_of(first, column) for first, name in _models(results, group).items()}
        for what, unit, numbers in (
            ("wall time of a run", "s", {label: [r.wall_seconds for r in each] for label, each in runs.items()}),
            ("largest memory of a run", "MB", {label: [_memory(r) for r in each] for label, each in runs.items()}),
        ):
            rows = [svg.Estimate(label, fmean(v), min(v), max(v)) for label, v in numbers.items() if v]
            title = group.title(what)
            if chart := svg.interval_chart(title, f"{what} ({unit})", rows, "mean, least to most"):
                caption = f"{title}, on the machines named in the list of runs; compare rows of one machine only."
                found.append(Picture(chart, caption))
    return found


def _memory(record: RunRecord) -> float:
    """MB on the GPU where there was one, else of the process."""
    return (record.peak_device_bytes or record.peak_memory_bytes) / 2**20


def _estimate(label: str, found: Interval, factor: float = 1.0) -> svg.Estimate:
    return svg.Estimate(label, factor * found.value, factor * found.low, factor * found.high)


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


def _read(results: SuiteResults, group: Group, runs: Path) -> Mapping[str, list[dict[str, Curve]]]:
    found = {}
    for row in results.rows:
        # By the name that the column has for all rows; the row says which quantity of its runs that is.
        names = {name: name for name in (LOSS, ENTROPY, ENTROPY_MAXIMUM, RANK)}
        for c in group.columns:
            names |= dict(zip(_logged(c.metric), _logged(c.metric_of(row)), strict=True))
        read = [
            read_curves(runs / record.hash / "metrics.jsonl", names.values())
            for record in results.runs_of(row.label, group.columns[0].name)
        ]
        found[row.label] = [{name: seed[own] for name, own in names.items() if own in seed} for seed in read]
    return found


def _logged(metric: str) -> list[str]:
    """Names under which a metric of the record may stand in metrics.jsonl."""
    return [metric] if metric.startswith("diag/") else [f"eval/{metric}"]


def _lines(curves: Mapping[str, list[dict[str, Curve]]], name: str, factor: float = 1.0) -> list[svg.Line]:
    lines = []
    for label, seeds in curves.items():
        present = [seed[name] for seed in seeds if name in seed]
        if present:
            lines.append(mean_line(label, present, factor))
    return [line for line in lines if len(line.x)]


def _curves(group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    found = []
    for column in group.columns:
        lines = [line for name in _logged(column.metric) for line in _lines(curves, name, column.factor)]
        if any(len(line.x) > 1 for line in lines):
            title = f"{column.name} while training"
            chart = svg.line_chart(title, "training step", _named(column), lines)
            found.append(Picture(chart, f"{title}. Mean over seeds, band of one standard deviation."))
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
            lines.append(svg.Line(line.label, [x for x, _ in found], [y for _, y in found]))
    if not any(len(line.x) > 1 for line in lines):
        return []
    title = group.title(f"{second.name} over {first.name}")
    chart = svg.line_chart(title, _named(first), _named(second), lines)
    return [Picture(chart, f"{title}, from step to step of training. Mean over seeds.")]


def _named(column: ColumnEntry) -> str:
    return f"{column.name} ({column.unit})" if column.unit else column.name


def _losses(group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    losses = [_in_own_range(line) for line in _lines(curves, LOSS) if len(line.x) > 1]
    if not losses:
        return []
    title = group.title("training loss")
    chart = svg.line_chart(title, "training step", "loss (0: its lowest, 1: its highest)", losses)
    caption = "Levels of different objectives are not comparable: each is scaled to the range of its mean."
    return [Picture(chart, f"{title}. {caption}")]


def _in_own_range(line: svg.Line) -> svg.Line:
    low, high = min(line.y), max(line.y)
    return svg.Line(line.label, line.x, [(y - low) / (high - low) if high > low else 0.0 for y in line.y])


def _is_shown(results: SuiteResults, kind: str, lines: Sequence[svg.Line]) -> bool:
    """Asked for by the suite, or a curve: a single measurement stands in the table of diagnostics."""
    return bool(lines) and (kind in results.manifest.show or any(len(line.x) > 1 for line in lines))


def _ranks(results: SuiteResults, group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    lines = _lines(curves, RANK)
    if not _is_shown(results, "rank", lines):
        return []
    title = group.title("rank of the embeddings")
    chart = svg.line_chart(title, "training step", "numerical rank (dimensions)", lines, from_zero=True)
    return [Picture(chart, f"{title}: directions in which at most 2000 test embeddings spread.")]


def _entropy(results: SuiteResults, group: Group, curves: Mapping[str, list[dict[str, Curve]]]) -> list[Picture]:
    lines = _lines(curves, ENTROPY)
    if not _is_shown(results, "entropy", lines):
        return []
    if tops := [line for line in _lines(curves, ENTROPY_MAXIMUM) if len(line.x)]:
        longest = max(tops, key=lambda line: len(line.x))
        lines.append(svg.Line("maximum (uniform weights)", longest.x, longest.y, is_reference=True))
    title = group.title("entropy of the negatives' weights")
    chart = svg.line_chart(title, "training step", "conditional entropy (nats)", lines)
    return [Picture(chart, f"{title}, on a training batch; higher means that the negatives are used more evenly.")]


CLASSES = (("same", "same class"), ("different", "different class"), ("all", "all pairs"))
NEIGHBOURS = (("correct", "correct (positives)"), ("incorrect", "incorrect (negatives)"))


def _histograms(results: SuiteResults, group: Group) -> list[Picture]:
    """Distances by class, or of positives and negatives that the data name (`show` says "pairs")."""
    kinds = {"histogram": (CLASSES, "test embeddings"), "pairs": (NEIGHBOURS, "held-out anchors and candidates")}
    found = []
    for kind in (kind for kind in kinds if kind in results.manifest.show):
        parts, of = kinds[kind]
        for first, name in _models(results, group).items():
            records = results.runs_of(first, group.columns[0].name)
            if series := _mean_histogram([record for record in records if record.histogram is not None], parts):
                title = group.title(name)
                chart = svg.histogram(title, "distance D = (1 - cosine) / 2", "density (1 / distance)", series)
                found.append(Picture(chart, f"{title} ({of})"))
    return found


def _mean_histogram(records: Sequence[RunRecord], parts: Sequence[tuple[str, str]]) -> list[svg.Steps]:
    """Mean over seeds of the density of pair distances, in parts; all pairs only where there is no other part."""
    series: list[svg.Steps] = []
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
            series.append(svg.Steps(label, edges, [fmean(values) for values in zip(*densities, strict=True)]))
    return series


def _scatter(results: SuiteResults, runs: Path) -> list[Picture]:
    """The points that planar runs leave in points.json: first seed of every cell."""
    if "scatter" not in results.manifest.show:
        return []
    found = []
    for column in results.columns:
        for row in results.rows:
            records = results.runs_of(row.label, column)
            points = _points(runs / records[0].hash / "points.json") if records else []
            if chart := svg.scatter_chart(f"{column}: {row.label}", "first coordinate", "second coordinate", points):
                found.append(Picture(chart, f"{column}: {row.label} (seed {records[0].seed})"))
    return found


def _points(path: Path) -> list[svg.Dots]:
    """Points of a run by class; none where the file is absent or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [(float(x), float(y), int(c)) for x, y, c in zip(found["x"], found["y"], found["label"], strict=True)]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    classes = sorted({c for _, _, c in rows})
    return [
        svg.Dots(f"class {c + 1}", [x for x, _, own in rows if own == c], [y for _, y, own in rows if own == c])
        for c in classes
    ]


def _columns(results: SuiteResults) -> list[Picture]:
    """A figure whose x axis are the columns: one line per row, at the numbers in the columns' names.

    Columns of different data, by what stands before the slash ("digits/blocks=2"), are pictures of their own.
    """
    found = []
    for part, names in groupby(results.columns, key=lambda name: name.rpartition("/")[0]):
        title = f"{results.manifest.title}: {part}" if part else results.manifest.title
        if chart := _column_chart(results, title, list(names)):
            mean = f"{part}: mean" if part else "Mean"
            found.append(Picture(chart, f"{mean} over seeds, band of one standard deviation."))
    return found


def _column_chart(results: SuiteResults, title: str, names: Sequence[str]) -> str:
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
            lines.append(svg.Line(row.label, xs, values, low, high))
    return svg.line_chart(title, results.manifest.x_label, results.manifest.y_label, lines)


def _number_in(name: str) -> float | None:
    try:
        return float(name.rpartition("=")[2])
    except ValueError:
        return None
