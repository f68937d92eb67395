"""Charts with two numeric axes: lines, histograms, points. A class holds data, description, drawing and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log
from typing import Any

from dipole.benchmarks.report.chart import (
    HEIGHT,
    NARROW,
    WIDTH,
    Chart,
    Rows,
    altair,
    cell_of,
    chosen,
    layered,
    rounded,
    series_by,
    tip,
    unless_chosen,
)
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable
from dipole.core.utils.text import counted

MARKERS = 10
"""About so many markers on a line. Each shows its values in a tooltip."""
MOST_BANDS = 3
"""Bands of more lines than this are hidden until one is chosen in the legend."""
NAMED = 12
"""So many values are read out in a description."""
WIDE_SPAN = 100
"""Ratio of the largest to the smallest value from which the axis of a curve is logarithmic."""


@dataclass(frozen=True)
class Line:
    """One series: y against x, with an optional band (low, high) of the same length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_reference: bool = False


@dataclass(frozen=True)
class LineChart(Chart):
    """Lines with bands. Values that are not finite interrupt a line."""

    lines: Sequence[Line]
    from_zero: bool = False
    is_log: bool = False
    is_log_y: bool = False

    @property
    def is_narrow(self) -> bool:
        return len(self.lines) == 1

    @property
    def shown(self) -> str:
        ends = []
        for line in self.lines:
            known = [value for value in line.y if isfinite(value)]
            if known:
                ends.append(f"{line.label} ends at {known[-1]:.4g}")
        return ", ".join(ends[:NAMED]) + "."

    @property
    def _has_band(self) -> bool:
        return any(line.low is not None for line in self.lines)

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        alt = altair()
        references = [line.label for line in self.lines if line.is_reference]
        colour, shape, dash = series_by([line.label for line in self.lines], references)
        x_axis: dict[str, Any] = {"grid": False}
        x_scale: dict[str, Any] = {"zero": False, "nice": False}
        if self.is_log:
            x_scale = {"type": "log", "nice": False}
            values = sorted({x for line in self.lines for x in line.x})
            x_axis |= {"values": values, "format": "~g", "labelOverlap": True}
        x = alt.X("x:Q", title=self.x_label, scale=alt.Scale(**x_scale), axis=alt.Axis(**x_axis))
        y_scale = alt.Scale(zero=self.from_zero)
        if self.is_log_y:
            y_scale = alt.Scale(type="log")

        def y(field: str) -> Any:
            return alt.Y(f"{field}:Q", title=self.y_label, scale=y_scale, axis=alt.Axis(tickCount=6))

        shown = unless_chosen(1.0, 0.12)
        base, layers = alt.Chart(), []
        tips = [tip("series", " "), tip("x", self.x_label, ".6~g"), tip("y", self.y_label, ".5~g")]
        if self._has_band:
            opacity = alt.OpacityValue(0.15)
            if len(self.lines) > MOST_BANDS:
                opacity = unless_chosen(0.15, 0.0, empty=False)
            layers.append(base.mark_area().encode(y=y("low"), y2="high", opacity=opacity))
            tips += [tip("low", number_format=".5~g"), tip("high", number_format=".5~g")]
        layers.append(base.mark_line(strokeWidth=2).encode(y=y("y"), strokeDash=dash, opacity=shown))
        marker = base.mark_point(filled=True, size=45, strokeWidth=0).transform_filter("datum.marker == 1")
        marker = marker.encode(y=y("y"), shape=shape, opacity=shown, tooltip=tips)
        layers.append(marker.add_params(chosen()).properties(name="series"))
        size = (WIDTH, HEIGHT)
        if self.is_narrow:
            size = NARROW
        chart = layered(layers, *size).encode(x=x, color=colour)
        return chart, {"rows": self._rows()}

    def _rows(self) -> Rows:
        """Points of all lines. Numbers that share an axis are rounded together."""
        xs = iter(rounded([x for line in self.lines for x in line.x]))
        values = [v for line in self.lines for of in (line.y, line.low or (), line.high or ()) for v in of]
        taken = iter(rounded(values))
        rows: Rows = []
        for line in self.lines:
            marked = _marked(line.y)
            y, low, high = ([next(taken) for _ in of] for of in (line.y, line.low or (), line.high or ()))
            for i, value in enumerate(y):
                row: dict[str, Any] = {"series": line.label, "x": next(xs), "y": value, "marker": int(i in marked)}
                if low and high:
                    row |= {"low": low[i], "high": high[i]}
                rows.append(row)
        return rows

    def numbers(self) -> ReportTable:
        rows = []
        for line in self.lines:
            for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
                cells = [Cell(line.label), cell_of(x), cell_of(y)]
                if line.low is not None and line.high is not None:
                    cells += [cell_of(line.low[i]), cell_of(line.high[i])]
                elif self._has_band:
                    cells += [EMPTY, EMPTY]
                rows.append(cells)
        head = ["series", self.x_label, self.y_label, "low", "high"]
        if not self._has_band:
            del head[3:]
        return self._table(head, rows)


@dataclass(frozen=True)
class Steps:
    """One histogram: heights between edges. There is one more edge than heights."""

    label: str
    edges: Sequence[float]
    heights: Sequence[float]


@dataclass(frozen=True)
class HistogramChart(Chart):
    """Outlined densities over each other. Pictures that are compared have the same `top`."""

    series: Sequence[Steps]
    top: float

    @property
    def is_narrow(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        return "Densities of " + ", ".join(one.label for one in self.series) + "."

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        alt = altair()
        heights = iter(rounded([h for one in self.series for h in [*one.heights, 0.0]]))
        rows = [{"series": one.label, "x": left, "y": next(heights)} for one in self.series for left in one.edges]
        colour, _, dash = series_by([one.label for one in self.series])
        edges = [e for one in self.series for e in one.edges]
        x_scale = alt.Scale(domain=[min(edges), max(edges)], nice=False)
        x = alt.X("x:Q", title=self.x_label, scale=x_scale)
        y = alt.Y("y:Q", title=self.y_label, scale=alt.Scale(domain=[0, self.top]), stack=None)
        base = alt.Chart()
        filled = base.mark_area(interpolate="step-after").encode(
            opacity=unless_chosen(0.18, 0.03), tooltip=[tip("series", " ")]
        )
        outline = base.mark_line(interpolate="step-after", strokeWidth=2).encode(
            strokeDash=dash, opacity=unless_chosen(1.0, 0.12)
        )
        layers = [filled, outline.add_params(chosen()).properties(name="series")]
        return layered(layers, *NARROW).encode(x=x, y=y, color=colour), {"rows": rows}

    def numbers(self) -> ReportTable:
        rows = [
            (Cell(one.label), cell_of(left), cell_of(right), cell_of(height))
            for one in self.series
            for (left, right), height in zip(pairwise(one.edges), one.heights, strict=True)
        ]
        return self._table(["series", f"{self.x_label} from", "to", self.y_label], rows)


@dataclass(frozen=True)
class Dots:
    """One group of points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class ScatterChart(Chart):
    """Points by group. If it `is_equal`, one length is the same on both axes, so that angles are true."""

    groups: Sequence[Dots]
    is_equal: bool = True

    @property
    def is_narrow(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        return ", ".join(f"{counted(len(group.x), 'point')} of {group.label}" for group in self.groups) + "."

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        alt = altair()
        xs = [x for group in self.groups for x in group.x]
        ys = [y for group in self.groups for y in group.y]
        labels = [group.label for group in self.groups for _ in group.x]
        rows = [{"series": s, "x": x, "y": y} for s, x, y in zip(labels, rounded(xs), rounded(ys), strict=True)]
        across = up = alt.Scale(zero=False)
        if self.is_equal:
            across, up = (alt.Scale(zero=False, nice=False, domain=domain) for domain in equal_scales(xs, ys))
        colour, shape, _ = series_by([group.label for group in self.groups])
        width, height = NARROW
        chart = alt.Chart(alt.NamedData("rows"), width=width, height=height)
        chart = (
            chart.mark_point(filled=True, size=18)
            .encode(
                x=alt.X("x:Q", title=self.x_label, scale=across),
                y=alt.Y("y:Q", title=self.y_label, scale=up),
                color=colour,
                shape=shape,
                opacity=unless_chosen(0.7, 0.06),
                tooltip=[tip("series", " "), tip("x", number_format=".4~g"), tip("y", number_format=".4~g")],
            )
            .add_params(chosen())
            .properties(name="series")
        )
        return chart, {"rows": rows}

    def numbers(self) -> ReportTable:
        rows = [
            (Cell(group.label), cell_of(x), cell_of(y))
            for group in self.groups
            for x, y in zip(group.x, group.y, strict=True)
        ]
        return self._table(["group", self.x_label, self.y_label], rows)


def line_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], from_zero: bool = False
) -> LineChart | None:
    """Return lines, None without a finite value.

    Axes are logarithmic if x grows by factors, or if y is positive and spans WIDE_SPAN.
    """
    if not any(isfinite(x) and isfinite(y) for line in lines for x, y in zip(line.x, line.y, strict=True)):
        return None
    numbers = [v for line in lines for of in (line.y, line.low or ()) for v in of if isfinite(v)]
    is_log_y = not from_zero and min(numbers) > 0 and max(numbers) > WIDE_SPAN * min(numbers)
    return LineChart(title, x_label, y_label, lines, from_zero, all(doubles(line.x) for line in lines), is_log_y)


def histogram(
    title: str, x_label: str, y_label: str, series: Sequence[Steps], top: float = 0.0
) -> HistogramChart | None:
    """Return densities over each other, on an axis up to `top` at least, or None if a value is missing."""
    heights = [h for s in series for h in s.heights]
    if not heights or not all(map(isfinite, [*heights, *(e for s in series for e in s.edges)])):
        return None
    return HistogramChart(title, x_label, y_label, series, max(top, *heights))


def scatter_chart(title: str, x_label: str, y_label: str, groups: Sequence[Dots]) -> ScatterChart | None:
    """Return the finite points by group, or None if there are none."""
    kept = []
    for group in groups:
        points = [(x, y) for x, y in zip(group.x, group.y, strict=True) if isfinite(x) and isfinite(y)]
        kept.append(Dots(group.label, [x for x, _ in points], [y for _, y in points]))
    if not any(group.x for group in kept):
        return None
    return ScatterChart(title, x_label, y_label, kept)


def doubles(x: Sequence[float]) -> bool:
    """Return whether positive numbers grow by factors (of 1.5 or more, or equal ones) and eightfold in all."""
    if len(x) < 3 or min(x) <= 0:
        return False
    ordered = sorted(set(x))
    if len(ordered) < 3 or ordered[-1] < 8 * ordered[0]:
        return False
    factors = [log(b / a) for a, b in pairwise(ordered)]
    return min(factors) >= log(1.5) or max(factors) <= 1.25 * min(factors)


def equal_scales(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return domains of a narrow picture in which one length is the same on both axes, with some room around."""
    width, height = NARROW
    tall = max(max(y) - min(y), (max(x) - min(x)) * height / width) * 1.06 or 1.0
    (a, b), half = ((min(x) + max(x)) / 2, (min(y) + max(y)) / 2), tall / 2
    return [a - half * width / height, a + half * width / height], [b - half, b + half]


def _marked(values: Sequence[float]) -> set[int]:
    """Places of the markers of a line: about MARKERS, the last, and values between two that are missing."""
    known = [False, *map(isfinite, values), False]
    alone = {i for i in range(len(values)) if known[i + 1] and not known[i] and not known[i + 2]}
    every = -(-len(values) // MARKERS)
    return {i for i in range(len(values)) if i % every == 0} | {len(values) - 1} | alone
