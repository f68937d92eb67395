"""The numbers of a chart as a table: what stands beside the figure in a paper."""

from functools import singledispatch
from itertools import pairwise
from math import isfinite

from dipole.benchmarks.report import kinds
from dipole.benchmarks.report.table import Cell, ReportTable, number


def as_table(chart: kinds.Chart, name: str) -> ReportTable:
    """The numbers that a chart draws."""
    head, rows = _numbers(chart)
    return ReportTable(name, chart.title, head, rows, chart.description)


Numbers = tuple[tuple[str, ...], list[tuple[Cell, ...]]]


@singledispatch
def _numbers(chart: kinds.Chart) -> Numbers:
    raise TypeError(f"no table for {type(chart).__name__}")


@_numbers.register
def _(chart: kinds.LineChart) -> Numbers:
    has_band = any(line.low is not None for line in chart.lines)
    rows = []
    for line in chart.lines:
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            low, high = (None if of is None else of[i] for of in (line.low, line.high))
            band = (_cell(low), _cell(high)) if has_band else ()
            rows.append((Cell(line.label), _cell(x), _cell(y), *band))
    return ("series", chart.x_label, chart.y_label, *(("low", "high") if has_band else ())), rows


@_numbers.register
def _(chart: kinds.HistogramChart) -> Numbers:
    rows: list[tuple[Cell, ...]] = [
        (Cell(one.label), _cell(left), _cell(right), _cell(height))
        for one in chart.series
        for (left, right), height in zip(pairwise(one.edges), one.heights, strict=True)
    ]
    return ("series", f"{chart.x_label} from", "to", chart.y_label), rows


@_numbers.register
def _(chart: kinds.ScatterChart) -> Numbers:
    rows: list[tuple[Cell, ...]] = []
    for group in chart.groups:
        rows += [(Cell(group.label), _cell(x), _cell(y)) for x, y in zip(group.x, group.y, strict=True)]
    return ("group", chart.x_label, chart.y_label), rows


@_numbers.register
def _(chart: kinds.IntervalChart) -> Numbers:
    has_source = any(row.source for row in chart.rows)
    rows = [
        (
            Cell(row.label),
            *([Cell(row.source)] if has_source else []),
            *map(_cell, (row.value, row.low, row.high)),
            _cell(len(row.runs)) if row.runs else Cell(""),
        )
        for row in chart.rows
    ]
    table = ReportTable("", "", ("row", *(["of"] if has_source else []), chart.x_label, "low", "high", "n"), rows)
    kept = table.without_empty_columns()
    return kept.head, list(kept.rows)


@_numbers.register
def _(chart: kinds.RankChart) -> Numbers:
    return ("row", chart.x_label), [(Cell(row.label), _cell(row.rank)) for row in chart.rows]


@_numbers.register
def _(chart: kinds.HeatMap) -> Numbers:
    columns = list(dict.fromkeys(tile.column for tile in chart.tiles))
    by: dict[str, dict[str, kinds.Tile]] = {}
    for tile in chart.tiles:
        by.setdefault(tile.row, {})[tile.column] = tile
    rows = [
        (Cell(label), *(Cell(t.text or number(t.value), t.value) if (t := of.get(c)) else Cell("") for c in columns))
        for label, of in by.items()
    ]
    return (chart.y_label or "row", *columns), rows


def _cell(value: float | None) -> Cell:
    if value is None or not isfinite(value):
        return Cell("")
    return Cell(str(value) if isinstance(value, int) else number(value), value)
