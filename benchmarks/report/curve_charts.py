"""Charts with two numeric axes: lines, histograms, points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log
from typing import Any

from dipole.benchmarks.report.chart import (
    HEIGHT,
    NAMED,
    NARROW,
    WIDTH,
    Chart,
    Rows,
    layered,
    series_by,
    short,
    tip,
    unless_chosen,
    values_of,
)
from dipole.core.utils.text import counted

MARKERS = 10
"""Approximate number of markers on a line. Each shows its values in a tooltip."""
MOST_BANDS = 3
"""Bands of more lines than this are hidden until one is chosen in the legend."""
WIDE_SPAN = 100
"""Ratio of the largest to the smallest value from which the axis of a curve is logarithmic."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One series: y against x, with an optional band (low, high) of the same length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_reference: bool = False


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    from_zero: bool = False,
    is_log: bool | None = None,
    is_log_y: bool | None = None,
) -> Chart | None:
    """Return lines with bands, None without a finite value. Values that are not finite interrupt a line.

    Axes are logarithmic by default if x grows by factors, and if y is positive and spans WIDE_SPAN.
    """
    rows = [row for line in lines for row in _points(line)]
    known = [row["y"] for row in rows if row["x"] is not None and row["y"] is not None]
    if not known:
        return None
    if is_log is None:
        is_log = all(doubles(line.x) for line in lines)
    if is_log_y is None:
        numbers = [*known, *(row["low"] for row in rows if row.get("low") is not None)]
        is_log_y = not from_zero and min(numbers) > 0 and max(numbers) > WIDE_SPAN * min(numbers)
    is_narrow, has_bands = len(lines) == 1, any("low" in row for row in rows)

    def draw(alt: Any) -> Any:
        labels = values_of(rows, "series")
        colour, shape, dash = series_by(labels, [line.label for line in lines if line.is_reference])
        x_axis, x_scale = alt.Axis(grid=False), alt.Scale(zero=False, nice=False)
        if is_log:
            values = sorted({row["x"] for row in rows})
            x_axis = alt.Axis(grid=False, values=values, format="~g", labelOverlap=True)
            x_scale = alt.Scale(type="log", nice=False)
        y_scale = alt.Scale(type="log") if is_log_y else alt.Scale(zero=from_zero)

        def y(field: str) -> Any:
            return alt.Y(f"{field}:Q", title=y_label, scale=y_scale, axis=alt.Axis(tickCount=6))

        shown, base, layers = unless_chosen(1.0, 0.12), alt.Chart(), []
        tips = [tip("series", " "), tip("x", x_label, ".6~g"), tip("y", y_label, ".5~g")]
        if has_bands:
            opacity = alt.OpacityValue(0.15)
            if len(labels) > MOST_BANDS:
                opacity = unless_chosen(0.15, 0.0, empty=False)
            layers.append(base.mark_area().encode(y=y("low"), y2="high", opacity=opacity))
            tips += [tip("low", number_format=".5~g"), tip("high", number_format=".5~g")]
        layers.append(base.mark_line(strokeWidth=2).encode(y=y("y"), strokeDash=dash, opacity=shown))
        marker = base.mark_point(filled=True, size=45, strokeWidth=0).transform_filter("datum.marker == 1")
        marker = marker.encode(y=y("y"), shape=shape, opacity=shown, tooltip=tips)
        layers.append(marker.properties(name="series"))
        size = NARROW if is_narrow else (WIDTH, HEIGHT)
        x = alt.X("x:Q", title=x_label, scale=x_scale, axis=x_axis)
        return layered(layers, *size, x=x, color=colour)

    ends = {row["series"]: row["y"] for row in rows if row["y"] is not None}
    shown = ", ".join([f"{label} ends at {value:.4g}" for label, value in ends.items()][:NAMED]) + "."
    columns = {"series": "series", "x": x_label, "y": y_label, "low": "low", "high": "high"}
    return Chart(title, x_label, y_label, rows, shown, draw, columns, is_narrow=is_narrow)


def _points(line: Line) -> Rows:
    """Return the points of a line. About MARKERS have a marker, and the last, and values between two missing ones."""
    known = [False, *map(isfinite, line.y), False]
    every = -(-len(line.y) // MARKERS)
    rows: Rows = []
    for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        is_alone = known[i + 1] and not known[i] and not known[i + 2]
        is_marked = i % every == 0 or i == len(line.y) - 1 or is_alone
        rows.append({"series": line.label, "x": short(x), "y": short(y), "marker": int(is_marked)})
        if line.low:
            rows[-1] |= {"low": short(line.low[i]), "high": short(line.high[i])}
    return rows


def histogram(
    title: str,
    x_label: str,
    y_label: str,
    edges: Sequence[float],
    densities: Mapping[str, Sequence[float]],
    top: float = 0.0,
) -> Chart | None:
    """Return outlined densities between the same edges over each other, or None if a value is missing.

    The axis goes up to `top` at least: pictures that are compared have the same.
    """
    heights = [height for each in densities.values() for height in each]
    if not heights or not all(map(isfinite, [*heights, *edges])):
        return None
    rows: Rows = []
    for label, each in densities.items():
        rows += [{"series": label, "x": short(x), "y": short(y)} for x, y in zip(edges, [*each, 0.0], strict=True)]

    def draw(alt: Any) -> Any:
        colour, _, dash = series_by(list(densities))
        places = [row["x"] for row in rows]
        x = alt.X("x:Q", title=x_label, scale=alt.Scale(domain=[min(places), max(places)], nice=False))
        y = alt.Y("y:Q", title=y_label, scale=alt.Scale(domain=[0, max(top, *heights)]), stack=None)
        filled = alt.Chart().mark_area(interpolate="step-after")
        filled = filled.encode(opacity=unless_chosen(0.18, 0.03), tooltip=[tip("series", " ")])
        outline = alt.Chart().mark_line(interpolate="step-after", strokeWidth=2)
        outline = outline.encode(strokeDash=dash, opacity=unless_chosen(1.0, 0.12))
        layers = [filled, outline.properties(name="series")]
        return layered(layers, *NARROW, x=x, y=y, color=colour)

    shown, columns = f"Densities of {', '.join(densities)}.", {"series": "series", "x": f"{x_label} from", "y": y_label}
    return Chart(title, x_label, y_label, rows, shown, draw, columns, is_narrow=True)


def scatter_chart(
    title: str, x_label: str, y_label: str, groups: Mapping[str, Points], is_equal: bool = True
) -> Chart | None:
    """Return the finite points by group, or None if there are none.

    If it `is_equal`, one length is the same on both axes, so that angles are true.
    """
    rows: Rows = []
    for label, points in groups.items():
        rows += [{"series": label, "x": short(x), "y": short(y)} for x, y in points if isfinite(x) and isfinite(y)]
    if not rows:
        return None

    def draw(alt: Any) -> Any:
        across = up = alt.Scale(zero=False)
        if is_equal:
            domains = equal_scales([row["x"] for row in rows], [row["y"] for row in rows])
            across, up = (alt.Scale(zero=False, nice=False, domain=domain) for domain in domains)
        colour, shape, _ = series_by(values_of(rows, "series"))
        x, y = alt.X("x:Q", title=x_label, scale=across), alt.Y("y:Q", title=y_label, scale=up)
        tips = [tip("series", " "), tip("x", number_format=".4~g"), tip("y", number_format=".4~g")]
        drawn = alt.Chart().mark_point(filled=True, size=18)
        drawn = drawn.encode(x=x, y=y, color=colour, shape=shape, opacity=unless_chosen(0.7, 0.06), tooltip=tips)
        return layered([drawn.properties(name="series")], *NARROW)

    shown = ", ".join(f"{counted(len(points), 'point')} of {label}" for label, points in groups.items()) + "."
    return Chart(
        title, x_label, y_label, rows, shown, draw, {"series": "group", "x": x_label, "y": y_label}, is_narrow=True
    )


def doubles(x: Sequence[float]) -> bool:
    """Return whether positive numbers grow by factors (of 1.5 or more, or equal ones) and eightfold in all."""
    ordered = sorted(set(x))
    if len(ordered) < 3 or ordered[0] <= 0 or ordered[-1] < 8 * ordered[0]:
        return False
    factors = [log(b / a) for a, b in pairwise(ordered)]
    return min(factors) >= log(1.5) or max(factors) <= 1.25 * min(factors)


def equal_scales(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return domains of a narrow picture in which one length is the same on both axes, with some room around."""
    width, height = NARROW
    tall = max(max(y) - min(y), (max(x) - min(x)) * height / width) * 1.06 or 1.0
    (a, b), half = ((min(x) + max(x)) / 2, (min(y) + max(y)) / 2), tall / 2
    return [a - half * width / height, a + half * width / height], [b - half, b + half]
