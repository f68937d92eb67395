"""Charts with a row per name: intervals, ranks, heat maps. A class holds data, description, drawing and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dipole.benchmarks.report.chart import (
    COLOURS,
    LETTER_WIDTH,
    SOFT,
    TEXT,
    Chart,
    Rows,
    altair,
    broken,
    cell_of,
    chosen,
    first_of,
    layered,
    rounded,
    row_step,
    series_by,
    sparse,
    tip,
    unless_chosen,
    width_beside,
    wrapped,
    wrapped_rows,
)
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable, count_cell, is_number, number
from dipole.core.utils.text import counted

MANY_RUNS = 12
"""From so many runs on their dots overlap and are drawn small."""
NAMED = 12
"""So many values are read out in a description."""
SPAN = 20
"""Ratio of the largest to the smallest number from which an axis is logarithmic."""
TILE = 52
"""Width of a tile with text."""


@dataclass(frozen=True)
class Estimate:
    """One row of an interval chart.

    `low` and `high` may be nan, `runs` are the values of the seeds, `source` says whose numbers these are.
    """

    label: str
    value: float
    low: float
    high: float
    runs: Sequence[float] = ()
    source: str = ""


@dataclass(frozen=True)
class IntervalChart(Chart):
    """One row per label: a marker, its interval, a dot per run. A vertical line at `reference` if there is one."""

    rows: Sequence[Estimate]
    reference: float | None = 0.0
    is_log: bool = False

    @property
    def shown(self) -> str:
        rows = [f"{(row.label + ' ' + row.source).strip()} {row.value:.4g}" for row in self.rows if isfinite(row.value)]
        return first_of(rows, NAMED) + "."

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        alt = altair()
        rows, dots = self._rows()
        labels = list(dict.fromkeys(row.label for row in self.rows))
        sources = list(dict.fromkeys(row.source for row in self.rows))
        has_sources = len(sources) > 1
        axis = alt.Axis(grid=True, gridDash=[1, 4], **wrapped_rows(labels))
        shared = {"y": alt.Y("label:N", title=None, sort=None, axis=axis), "color": alt.ColorValue(COLOURS[0])}
        marker = {}
        if has_sources:
            colour, shape, _ = series_by(sources)
            marker = {"shape": shape}
            shared |= {"color": colour, "yOffset": alt.YOffset("series:N", sort=sources)}
            shared["opacity"] = unless_chosen(1.0, 0.12)
        scale = alt.Scale(zero=False)
        if self.is_log:
            scale = alt.Scale(type="log")

        def x(field: str = "x") -> Any:
            return alt.X(f"{field}:Q", title=self.x_label, scale=scale)

        tips = [tip("label", " ")]
        if has_sources:
            tips.append(tip("series", "of"))
        tips += [tip("x", self.x_label, ".5~g"), tip("low", number_format=".5~g"), tip("high", number_format=".5~g")]
        base = alt.Chart()
        span = base.mark_rule(strokeWidth=3, opacity=0.55).transform_filter("isValid(datum.low)")
        span = span.encode(**shared, x=x("low"), x2="high")
        point = base.mark_point(filled=True, size=80).encode(**shared, x=x(), tooltip=tips, **marker)
        layers, has_many = [span, point], max(len(row.runs) for row in self.rows) > MANY_RUNS
        data = {"rows": rows}
        if dots:
            data["dots"] = dots
            # Few runs are rings over the mean that can be counted, many are small dots below it.
            runs = self._draw_runs({k: v for k, v in shared.items() if k != "opacity"}, x(), has_many)
            layers.insert(0 if has_many else 2, runs)
        if self.reference is not None:
            data["reference"] = [{"x": self.reference}]
            line = alt.Chart(alt.NamedData("reference"))
            layers.insert(0, line.mark_rule(color=SOFT, strokeWidth=1.5).encode(x=x()))
        if has_sources:
            layers[-1] = layers[-1].add_params(chosen()).properties(name="series")
        height = alt.Step(max(row_step(labels), 11 + 13 * len(sources)))
        if has_sources:
            height["for"] = "position"
        return layered(layers, width_beside(labels), height), data

    @staticmethod
    def _draw_runs(shared: dict[str, Any], x: Any, has_many: bool) -> Any:
        alt = altair()
        style, colour = {"size": 22, "strokeWidth": 1.2, "opacity": 0.9}, TEXT
        if has_many:
            style, colour = {"size": 10, "strokeWidth": 0.9, "opacity": 0.45}, SOFT
        shared = shared | {"color": alt.ColorValue(colour)}
        mark = alt.Chart(alt.NamedData("dots")).mark_point(filled=False, **style)
        return mark.encode(**shared, x=x, tooltip=[tip("x", "one run", ".5~g")])

    def _rows(self) -> tuple[Rows, Rows]:
        """Return the rows, and the dots of their runs."""
        taken = iter(rounded([v for row in self.rows for v in (row.value, row.low, row.high, *row.runs)]))
        rows: Rows = []
        dots: Rows = []
        for row in self.rows:
            value, low, high, *runs = (next(taken) for _ in range(3 + len(row.runs)))
            if low is None or high is None:
                low = high = None
            name = {"label": row.label, "series": row.source}
            rows.append({**name, "x": value, "low": low, "high": high})
            dots += [{**name, "x": each} for each in runs if each is not None]
        return rows, dots

    def numbers(self) -> ReportTable:
        rows = []
        for row in self.rows:
            runs = count_cell(len(row.runs) or None)
            rows.append([Cell(row.label), Cell(row.source), *map(cell_of, (row.value, row.low, row.high)), runs])
        head = ["row", "of", self.x_label, "low", "high", "n"]
        return self._table(head, rows).without_empty_columns()


@dataclass(frozen=True)
class RankChart(Chart):
    """Mean ranks of rows (label, rank), best first.

    Bars join the rows (first, last) whose ranks differ by less than `difference`.
    """

    rows: Sequence[tuple[str, float]]
    groups: Sequence[tuple[int, int]]
    difference: float

    @property
    def shown(self) -> str:
        rows = ", ".join(f"{label} {rank:.3g}" for label, rank in self.rows)
        names = [label for label, _ in self.rows]
        joined = ", ".join(f"{names[a]} to {names[b]}" for a, b in self.groups)
        return f"{rows}. Critical difference {self.difference:.3g}. Not significant: {joined or 'none'}."

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        alt = altair()
        labels, ranks = [label for label, _ in self.rows], [rank for _, rank in self.rows]
        # Bars are drawn to the right of the worst rank, at equal distances.
        room = 0.06 * max(max(ranks) - min(ranks), 0.5)
        bars = [
            {"x": max(ranks) + (i + 1.5) * room, "label": labels[a], "end": labels[b],
             "group": f"{labels[a]} to {labels[b]}"}
            for i, (a, b) in enumerate(self.groups)
        ]  # fmt: skip
        rows = [{"label": label, "x": round(rank, 3)} for label, rank in self.rows]
        scale = alt.Scale(domain=[min(ranks) - room, max(ranks) + (len(bars) + 1.5) * room], nice=False, zero=False)
        x = alt.X("x:Q", title=self.x_label, scale=scale, axis=alt.Axis(tickMinStep=0.5))
        axis = alt.Axis(grid=True, gridDash=[1, 4], **wrapped_rows(labels))
        y = alt.Y("label:N", title=None, scale=alt.Scale(domain=labels), axis=axis)
        point = alt.Chart().mark_point(filled=True, size=80)
        point = point.encode(
            x=x, y=y, color=alt.ColorValue(COLOURS[0]), tooltip=[tip("label", " "), tip("x", "mean rank", ".3~g")]
        )
        bar = alt.Chart(alt.NamedData("bars")).mark_rule(strokeWidth=5, strokeCap="round")
        bar = bar.encode(
            x=x, y=y, y2="end", color=alt.ColorValue(COLOURS[1]), tooltip=[tip("group", "not significant")]
        )
        chart = layered([point, bar], width_beside(labels), alt.Step(row_step(labels)))
        return chart, {"rows": rows, "bars": bars}

    def numbers(self) -> ReportTable:
        return self._table(["row", self.x_label], [(Cell(label), cell_of(rank)) for label, rank in self.rows])


@dataclass(frozen=True)
class Tile:
    """One place of a heat map: its value and, if it differs from the value, its text."""

    row: str
    column: str
    value: float
    text: str = ""


@dataclass(frozen=True)
class HeatMap(Chart):
    """Rows by columns, the value as colour. `middle` is where two colours meet, None for one scale of colours."""

    tiles: Sequence[Tile]
    value_label: str
    middle: float | None = None

    @property
    def shown(self) -> str:
        rows, columns = {tile.row for tile in self.tiles}, {tile.column for tile in self.tiles}
        return f"{counted(len(rows), 'row')} by {counted(len(columns), 'column')}. Colour: {self.value_label}."

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        alt = altair()
        values = rounded([tile.value for tile in self.tiles])
        has_text = any(tile.text for tile in self.tiles)
        rows: Rows = []
        for tile, value in zip(self.tiles, values, strict=True):
            rows.append({"row": tile.row, "column": tile.column, "value": value})
            if has_text:
                rows[-1]["text"] = tile.text
        labels = list(dict.fromkeys(tile.row for tile in self.tiles))
        names = _in_order(list(dict.fromkeys(tile.column for tile in self.tiles)))
        room = max(200, min(width_beside(labels), TILE / 2 * len(names))) / len(names)
        step, width = room, round(room * len(names))
        if has_text:
            step, width = TILE, alt.Step(TILE)
        x = alt.X("column:N", title=self.x_label or None, sort=names, axis=self._x_axis(names, step))
        y = alt.Y("row:N", title=self.y_label or None, sort=None, axis=alt.Axis(**wrapped_rows(labels)))
        colours, is_dark = self._colours([value for value in values if value is not None])
        title: str | list[str] = self.value_label
        if len(title) > 60:
            title = broken(self.value_label)
        legend = alt.Legend(title=title, titleLimit=0, gradientLength=180, direction="horizontal")
        value_tip = tip("value", self.value_label, ".4~g")
        layers = [alt.Chart().mark_rect().encode(color=alt.Color("value:Q", scale=colours, legend=legend))]
        if has_text:
            value_tip = tip("text", self.value_label)
            ink = alt.ColorValue("#101418", condition={"test": is_dark, "value": "#ffffff"})
            layers.append(alt.Chart().mark_text(fontSize=11).encode(text=alt.Text("text:N"), color=ink))
        tips = [tip("row", self.y_label or "row"), tip("column", self.x_label or "column"), value_tip]
        chart = layered(layers, width, alt.Step(row_step(labels) - 2))
        return chart.encode(x=x, y=y, tooltip=tips), {"rows": rows}

    @staticmethod
    def _x_axis(names: Sequence[str], step: float) -> Any:
        """Numbers may be left out where they have no room, names may not: they are tilted."""
        given = wrapped(names)
        if names and is_number(names[0]):
            given["values"] = sparse(names, step)
        elif max(map(len, names)) * LETTER_WIDTH > step:
            return altair().Axis(labelAngle=-40, labelOverlap=False, **given)
        return altair().Axis(labelAngle=0, labelOverlap=False, **given)

    def _colours(self, known: Sequence[float]) -> tuple[Any, str]:
        """Return the scale of colours, and a test for tiles so dark that their text is white."""
        alt = altair()
        if self.middle is None:
            return alt.Scale(scheme="viridis"), f"datum.value < {(min(known) + max(known)) / 2!r}"
        reach = max(abs(v - self.middle) for v in known) or 1.0
        domain = [self.middle - reach, self.middle + reach]
        is_dark = f"abs(datum.value - {self.middle!r}) > {0.7 * reach!r}"
        return alt.Scale(scheme="purpleorange", domain=domain, reverse=True), is_dark

    def numbers(self) -> ReportTable:
        columns = list(dict.fromkeys(tile.column for tile in self.tiles))
        by_row: dict[str, dict[str, Tile]] = {}
        for tile in self.tiles:
            by_row.setdefault(tile.row, {})[tile.column] = tile
        rows = []
        for label, tiles in by_row.items():
            cells = [Cell(label)]
            for column in columns:
                cells.append(EMPTY)
                if found := tiles.get(column):
                    cells[-1] = Cell(found.text or number(found.value), found.value)
            rows.append(cells)
        return self._table([self.y_label or "row", *columns], rows)


def interval_chart(
    title: str, x_label: str, rows: Sequence[Estimate], reference: float | None = 0.0
) -> IntervalChart | None:
    """Return estimates below each other, None without a number. The axis is logarithmic if they span SPAN."""
    numbers = [v for r in rows for v in (r.value, r.low, r.high, *r.runs) if isfinite(v)]
    if not numbers:
        return None
    is_log = reference is None and min(numbers) > 0 and max(numbers) > SPAN * min(numbers)
    return IntervalChart(title, x_label, "", rows, reference, is_log)


def heat_map(
    title: str, x_label: str, y_label: str, tiles: Sequence[Tile], value_label: str, middle: float | None = None
) -> HeatMap | None:
    """Return the finite tiles of rows by columns, or None if there are none."""
    kept = [tile for tile in tiles if isfinite(tile.value)]
    if not kept:
        return None
    return HeatMap(title, x_label, y_label, kept, value_label, middle)


def _in_order(names: list[str]) -> list[str]:
    """Numbers by size, as a row may lack some. Other names as they come."""
    try:
        return sorted(names, key=float)
    except ValueError:
        return names
