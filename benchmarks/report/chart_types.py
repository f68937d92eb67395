"""The types of charts: lines, histograms and points; intervals, ranks and heat maps with a row per name."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from math import isfinite, log
from typing import Any

from dipole.benchmarks.report import chart
from dipole.benchmarks.report.chart import Chart, Rows, short, tip
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable, is_number
from dipole.benchmarks.statistics import number
from dipole.core.utils.text import counted

MARKERS = 10  # Approximate number of markers on a line. Each shows its values in a tooltip.
MOST_BANDS = 3  # bands of more lines than this are hidden until one is chosen in the legend
WIDE_SPAN = 100  # ratio of the largest to the smallest value from which the axis of a curve is logarithmic
SPAN = 20  # ratio of the largest to the smallest number from which an axis is logarithmic
TILE = 52  # width of a tile with text
LARGE = 100  # A map of more tiles is a large picture

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
    """Return lines with bands, or None without a finite value. By default the numbers decide on logarithmic axes."""
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

    def draw(alt: Any) -> dict[str, Any]:
        labels = chart.values_of(rows, "series")
        colour, shape, dash = chart.series_by(labels, [line.label for line in lines if line.is_reference])
        x_axis, x_scale = alt.Axis(grid=False), alt.Scale(zero=False, nice=False)
        if is_log:
            values = sorted({row["x"] for row in rows})
            x_axis = alt.Axis(grid=False, values=values, format="~g", labelOverlap=True)
            x_scale = alt.Scale(type="log", nice=False)
        y_scale = alt.Scale(type="log") if is_log_y else alt.Scale(zero=from_zero)

        def y(field: str) -> Any:
            return alt.Y(f"{field}:Q", title=y_label, scale=y_scale, axis=alt.Axis(tickCount=6))

        shown, base, layers = chart.unless_chosen(1.0, 0.12), alt.Chart(), []
        tips = [tip("series", " "), tip("x", x_label, ".6~g"), tip("y", y_label, ".5~g")]
        if has_bands:
            opacity = alt.OpacityValue(0.15)
            if len(labels) > MOST_BANDS:
                opacity = chart.unless_chosen(0.15, 0.0, empty=False)
            layers.append(base.mark_area().encode(y=y("low"), y2=alt.Y2("high"), opacity=opacity))
            tips += [tip("low", number_format=".5~g"), tip("high", number_format=".5~g")]
        layers.append(base.mark_line(strokeWidth=2).encode(y=y("y"), strokeDash=dash, opacity=shown))
        marker = base.mark_point(filled=True, size=45, strokeWidth=0).transform_filter("datum.marker == 1")
        marker = marker.encode(y=y("y"), shape=shape, opacity=shown, tooltip=tips)
        layers.append(marker.properties(name="series"))
        size = chart.NARROW if is_narrow else (chart.WIDTH, chart.HEIGHT)
        x = alt.X("x:Q", title=x_label, scale=x_scale, axis=x_axis)
        return chart.layered(layers, *size, x=x, color=colour)

    ends = {row["series"]: row["y"] for row in rows if row["y"] is not None}
    shown = ", ".join([f"{label} ends at {value:.4g}" for label, value in ends.items()][: chart.NAMED]) + "."
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
    """Return outlined densities between the same edges, or None if a value is missing. The axis goes up to `top`."""
    heights = [height for each in densities.values() for height in each]
    if not heights or not all(map(isfinite, [*heights, *edges])):
        return None
    rows: Rows = []
    for label, each in densities.items():
        rows += [{"series": label, "x": short(x), "y": short(y)} for x, y in zip(edges, [*each, 0.0], strict=True)]

    places = [row["x"] for row in rows]
    reach = (min(places), max(places)), (0, max(top, *heights))
    draw = partial(_densities, series=tuple(densities), labels=(x_label, y_label), reach=reach)
    shown, columns = f"Densities of {', '.join(densities)}.", {"series": "series", "x": f"{x_label} from", "y": y_label}
    return Chart(title, x_label, y_label, rows, shown, draw, columns, is_narrow=True)


@lru_cache(maxsize=64)  # a suite has many of them on the same axes
def _densities(
    alt: Any, series: tuple[str, ...], labels: tuple[str, str], reach: tuple[tuple[float, float], tuple[float, float]]
) -> dict[str, Any]:
    colour, _, dash = chart.series_by(series)
    x = alt.X("x:Q", title=labels[0], scale=alt.Scale(domain=reach[0], nice=False))
    y = alt.Y("y:Q", title=labels[1], scale=alt.Scale(domain=reach[1]), stack=None)
    filled = alt.Chart().mark_area(interpolate="step-after")
    filled = filled.encode(opacity=chart.unless_chosen(0.18, 0.03), tooltip=[tip("series", " ")])
    outline = alt.Chart().mark_line(interpolate="step-after", strokeWidth=2)
    outline = outline.encode(strokeDash=dash, opacity=chart.unless_chosen(1.0, 0.12))
    return chart.layered([filled, outline.properties(name="series")], *chart.NARROW, x=x, y=y, color=colour)


def scatter_chart(
    title: str, x_label: str, y_label: str, groups: Mapping[str, Points], is_equal: bool = True
) -> Chart | None:
    """Return the finite points by group, or None. If it `is_equal`, one length is the same on both axes."""
    rows: Rows = []
    for label, points in groups.items():
        rows += [{"series": label, "x": short(x), "y": short(y)} for x, y in points if isfinite(x) and isfinite(y)]
    if not rows:
        return None

    def draw(alt: Any) -> dict[str, Any]:
        across = up = alt.Scale(zero=False)
        if is_equal:
            domains = equal_scales([row["x"] for row in rows], [row["y"] for row in rows])
            across, up = (alt.Scale(zero=False, nice=False, domain=domain) for domain in domains)
        colour, shape, _ = chart.series_by(chart.values_of(rows, "series"))
        x, y = alt.X("x:Q", title=x_label, scale=across), alt.Y("y:Q", title=y_label, scale=up)
        tips = [tip("series", " "), tip("x", number_format=".4~g"), tip("y", number_format=".4~g")]
        drawn = alt.Chart().mark_point(filled=True, size=18)
        drawn = drawn.encode(x=x, y=y, color=colour, shape=shape, opacity=chart.unless_chosen(0.7, 0.06), tooltip=tips)
        return chart.layered([drawn.properties(name="series")], *chart.NARROW)

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
    width, height = chart.NARROW
    tall = max(max(y) - min(y), (max(x) - min(x)) * height / width) * 1.06 or 1.0
    (a, b), half = ((min(x) + max(x)) / 2, (min(y) + max(y)) / 2), tall / 2
    return [a - half * width / height, a + half * width / height], [b - half, b + half]


@dataclass(frozen=True)
class ChartRow:
    label: str
    value: float
    low: float  # or nan
    high: float
    runs: Sequence[float] = ()  # the values of the seeds
    source: str = ""  # whose numbers these are


def interval_chart(title: str, x_label: str, rows: Sequence[ChartRow], reference: float | None = 0.0) -> Chart | None:
    """Return estimates below each other, each with its interval and a dot per run. None without a number."""
    numbers = [v for r in rows for v in (r.value, r.low, r.high, *r.runs) if isfinite(v)]
    if not numbers:
        return None
    found: Rows = []
    datasets: dict[str, Rows] = {"dots": []}
    for row in rows:
        low, high = short(row.low), short(row.high)
        if low is None or high is None:
            low = high = None
        name = {"label": row.label, "series": row.source}
        found.append({**name, "x": short(row.value), "low": low, "high": high, "runs": len(row.runs) or None})
        datasets["dots"] += [{**name, "x": short(each)} for each in row.runs if isfinite(each)]
    datasets = {name: dots for name, dots in datasets.items() if dots}
    if reference is not None:
        datasets["reference"] = [{"x": reference}]
    is_log = reference is None and min(numbers) > 0 and max(numbers) > SPAN * min(numbers)

    def draw(alt: Any) -> dict[str, Any]:
        labels, sources = chart.values_of(found, "label"), chart.values_of(found, "series")
        y = alt.Y("label:N", title=None, sort=None, axis=chart.row_axis(labels, grid=True, gridDash=[1, 4]))
        shared = {"y": y, "color": alt.ColorValue(chart.COLOURS[0])}
        marker, tips = {}, [tip("label", " ")]
        height = alt.Step(max(chart.row_step(labels), 11 + 13 * len(sources)))
        if len(sources) > 1:
            colour, shape, _ = chart.series_by(sources)
            marker["shape"] = shape
            shared |= {"color": colour, "yOffset": alt.YOffset("series:N", sort=sources)}
            shared["opacity"] = chart.unless_chosen(1.0, 0.12)
            tips.append(tip("series", "of"))
            height["for"] = "position"
        scale = alt.Scale(type="log") if is_log else alt.Scale(zero=False)

        def x(field: str = "x") -> Any:
            return alt.X(f"{field}:Q", title=x_label, scale=scale)

        tips += [tip("x", x_label, ".5~g"), tip("low", number_format=".5~g"), tip("high", number_format=".5~g")]
        span = alt.Chart().mark_rule(strokeWidth=3, opacity=0.55).transform_filter("isValid(datum.low)")
        point = alt.Chart().mark_point(filled=True, size=80)
        layers = [span.encode(**shared, x=x("low"), x2=alt.X2("high"))]
        layers.append(point.encode(**shared, x=x(), tooltip=tips, **marker))
        if "dots" in datasets:
            style = {"size": 16, "strokeWidth": 1, "opacity": 0.6}
            dots = alt.Chart(alt.NamedData("dots")).mark_point(filled=False, **style)
            own = {name: each for name, each in shared.items() if name != "opacity"}
            own |= {"color": alt.ColorValue(chart.TEXT), "tooltip": [tip("x", "one run", ".5~g")]}
            layers.append(dots.encode(**own, x=x()))
        if reference is not None:
            line = alt.Chart(alt.NamedData("reference"))
            layers.insert(0, line.mark_rule(color=chart.SOFT, strokeWidth=1.5).encode(x=x()))
        if len(sources) > 1:
            layers[-1] = layers[-1].properties(name="series")
        return chart.layered(layers, chart.width_beside(labels), height)

    said = [f"{(row.label + ' ' + row.source).strip()} {row.value:.4g}" for row in rows if isfinite(row.value)]
    columns = {"label": "row", "series": "of", "x": x_label, "low": "low", "high": "high", "runs": "n"}
    return Chart(title, x_label, "", found, chart.first_of(said, chart.NAMED) + ".", draw, columns, datasets)


def rank_chart(
    title: str, x_label: str, ranks: Sequence[tuple[str, float]], groups: Sequence[tuple[int, int]], difference: float
) -> Chart:
    """Return mean ranks of rows (label, rank), best first. Bars join the rows (first, last) of a group."""
    names = [label for label, _ in ranks]
    worst = max(rank for _, rank in ranks)
    # Bars are drawn to the right of the worst rank, at equal distances.
    room = 0.06 * max(worst - min(rank for _, rank in ranks), 0.5)
    bars: Rows = []
    for i, (a, b) in enumerate(groups):
        name = f"{names[a]} to {names[b]}"
        bars.append({"x": worst + (i + 1.5) * room, "label": names[a], "end": names[b], "group": name})

    def draw(alt: Any) -> dict[str, Any]:
        scale = alt.Scale(zero=False, nice=False, padding=12)
        x = alt.X("x:Q", title=x_label, scale=scale, axis=alt.Axis(tickMinStep=0.5))
        axis = chart.row_axis(names, grid=True, gridDash=[1, 4])
        y = alt.Y("label:N", title=None, scale=alt.Scale(domain=names), axis=axis)
        point = alt.Chart().mark_point(filled=True, size=80)
        tips = [tip("label", " "), tip("x", x_label, ".3~g")]
        point = point.encode(x=x, y=y, color=alt.ColorValue(chart.COLOURS[0]), tooltip=tips)
        rule = alt.Chart(alt.NamedData("bars")).mark_rule(strokeWidth=5, strokeCap="round")
        tips = [tip("group", "not significant")]
        rule = rule.encode(x=x, y=y, y2=alt.Y2("end"), color=alt.ColorValue(chart.COLOURS[1]), tooltip=tips)
        return chart.layered([point, rule], chart.width_beside(names), alt.Step(chart.row_step(names)))

    rows = [{"label": label, "x": short(rank)} for label, rank in ranks]
    said = ", ".join(f"{label} {rank:.3g}" for label, rank in ranks)
    joined = ", ".join(bar["group"] for bar in bars) or "none"
    shown = f"{said}. Critical difference {difference:.3g}. Not significant: {joined}."
    return Chart(title, x_label, "", rows, shown, draw, {"label": "row", "x": x_label}, {"bars": bars})


@dataclass(frozen=True)
class Tile:
    """One place of a heat map: its value and, if it differs from the value, its text."""

    row: str
    column: str
    value: float
    text: str = ""


def heat_map(
    title: str, x_label: str, y_label: str, tiles: Sequence[Tile], value_label: str, middle: float | None = None
) -> Chart | None:
    """Return the finite tiles of rows by columns, or None. `middle` is where two scales of colours meet."""
    rows: Rows = [
        {"row": tile.row, "column": tile.column, "value": short(tile.value), "text": tile.text}
        for tile in tiles
        if isfinite(tile.value)
    ]
    if not rows:
        return None
    labels, columns = chart.values_of(rows, "row"), chart.values_of(rows, "column")

    def draw(alt: Any) -> dict[str, Any]:
        names, has_text = columns, any(row["text"] for row in rows)
        with suppress(ValueError):  # numbers by size, as a row may lack some
            names = sorted(columns, key=float)
        step = max(200, min(chart.width_beside(labels), TILE / 2 * len(names))) / len(names)
        width = round(step * len(names))
        if has_text:
            step, width = TILE, alt.Step(TILE)
        # Numbers may be left out where they have no room, names may not: they are tilted.
        axis = alt.Axis(labelAngle=-40, labelOverlap=False, **chart.wrapped(names))
        if is_number(names[0]):
            axis = alt.Axis(labelAngle=0, labelOverlap=True)
        x = alt.X("column:N", title=x_label or None, sort=names, axis=axis)
        y = alt.Y("row:N", title=y_label or None, sort=None, axis=chart.row_axis(labels))
        colours, is_dark = _colours(alt, [row["value"] for row in rows], middle)
        legend_title = chart.broken(value_label) if len(value_label) > 60 else value_label
        legend = alt.Legend(title=legend_title, titleLimit=0, gradientLength=180, direction="horizontal")
        layers = [alt.Chart().mark_rect().encode(color=alt.Color("value:Q", scale=colours, legend=legend))]
        value_tip = tip("value", value_label, ".4~g")
        if has_text:
            value_tip = tip("text", value_label)
            ink = alt.ColorValue("#101418", condition={"test": is_dark, "value": "#ffffff"})
            layers.append(alt.Chart().mark_text(fontSize=11).encode(text=alt.Text("text:N"), color=ink))
        tips = [tip("row", y_label or "row"), tip("column", x_label or "column"), value_tip]
        return chart.layered(layers, width, alt.Step(chart.row_step(labels) - 2), x=x, y=y, tooltip=tips)

    cells = {(row["row"], row["column"]): Cell(row["text"] or number(row["value"]), row["value"]) for row in rows}
    lines = [(Cell(label), *(cells.get((label, name), EMPTY) for name in columns)) for label in labels]
    table = ReportTable("", title, (y_label or "row", *columns), lines)
    shown = f"{counted(len(labels), 'row')} by {counted(len(columns), 'column')}. Colour: {value_label}."
    return Chart(title, x_label, y_label, rows, shown, draw, is_large=len(rows) > LARGE, table=table)


def _colours(alt: Any, values: Sequence[float], middle: float | None) -> tuple[Any, str]:
    """Return the scale of colours, and a test for tiles so dark that their text is white."""
    if middle is None:
        return alt.Scale(scheme="viridis"), f"datum.value < {(min(values) + max(values)) / 2!r}"
    reach = max(abs(value - middle) for value in values) or 1.0
    is_dark = f"abs(datum.value - {middle!r}) > {0.7 * reach!r}"
    return alt.Scale(scheme="purpleorange", domain=[middle - reach, middle + reach], reverse=True), is_dark
