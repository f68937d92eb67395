"""Charts drawn by Vega-Altair: one function per kind from its data to a Vega-Lite spec, and specs as SVG and PDF.

Colours are names of the page's style sheet (`var(--c0)`), so that one picture serves light, dark and print; files get
the light ones.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, singledispatch
from importlib.resources import files
from math import isfinite
from textwrap import wrap
from typing import Any

from dipole.benchmarks.report.kinds import (
    Chart,
    HeatMap,
    HistogramChart,
    IntervalChart,
    LineChart,
    ScatterChart,
)
from dipole.core.ground.errors import ConfigError
from dipole.core.ground.extras import install_line

WIDTH, HEIGHT = 420, 240
# Pictures that stand three in a row: their text is as large on the page as that of the others.
NARROW = 280, 190
COLOURS = [f"var(--c{i})" for i in range(8)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
DASHES = [[1, 0], [7, 4], [2, 3], [8, 3, 2, 3]]
# So many markers on a line tell it from others; each holds the values under the pointer.
MARKERS = 10
# Bands of more lines than this lie over each other until one is chosen in the legend.
BANDS = 3
# Widths of its letters are those that vl-convert measures with, so that no label is cut in a browser.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
LETTERS, ROWS = 30, 3


@singledispatch
def _drawn(chart: Chart) -> Any:
    raise TypeError(f"no drawing for {type(chart).__name__}")


def spec(chart: Chart) -> dict[str, Any]:
    """The Vega-Lite spec of a chart, with its data.

    Raises:
        ConfigError: Vega-Altair is not installed.
    """
    alt = _altair()
    width, height = NARROW if chart.is_narrow else (WIDTH, HEIGHT)
    drawn = _drawn(chart)
    if isinstance(chart, IntervalChart):
        # Names and intervals share the width, so that long names do not make the picture, and its letters, smaller.
        longest = max(min(len(row.label), LETTERS) for row in chart.rows)
        drawn = drawn.properties(width=WIDTH + 40 - int(6.2 * longest))
    elif not isinstance(chart, HeatMap):
        drawn = drawn.properties(width=width)
    if not isinstance(chart, HeatMap | IntervalChart):
        drawn = drawn.properties(height=height)
    # The schema is held by the tests: checking every chart takes longer than drawing it.
    with alt.data_transformers.disable_max_rows():
        found: dict[str, Any] = drawn.properties(description=chart.description).to_dict(validate=False)
    found.pop("config", None)
    return found


def to_svg(drawn: Mapping[str, Any]) -> str:
    """A spec as SVG, in the names of colours of the page."""
    svg: str = _converter().vegalite_to_svg({**drawn, "config": CONFIG})
    return svg


def to_files(chart: Chart) -> dict[str, str | bytes]:
    """A chart as files, by suffix: SVG and PDF in the light colours, with the title that the page has in its text."""
    titled = {**spec(chart), "title": chart.title}
    svg = with_colours(to_svg(titled), light())
    return {".svg": svg, ".pdf": _converter().svg_to_pdf(svg)}


def with_colours(svg: str, colours: Mapping[str, str]) -> str:
    """Names of colours replaced by the colours; a white ground."""
    found = re.sub(r"var\(--([a-z0-9]+)\)", lambda m: colours[m[1]], svg)
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', found, count=1)


@cache
def light() -> Mapping[str, str]:
    """The colours that the style sheet has for paper."""
    sheet = files("dipole.benchmarks").joinpath("templates", "report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", sheet.partition("}")[0]))


@cache
def runtime() -> str:
    """Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, for the page."""
    bundle: str = _converter().javascript_bundle()
    return bundle.replace("</script", "<\\/script")


CONFIG: dict[str, Any] = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--text)", "titleColor": "var(--text)", "gridColor": "var(--line)",
        "tickColor": "var(--soft)",
        "domainColor": "var(--soft)", "labelFontSize": 11.5, "titleFontSize": 12.5, "titleFontWeight": "normal",
        "labelLimit": 0, "titleLimit": 0, "aria": False,
    },
    "legend": {
        "labelColor": "var(--text)", "titleColor": "var(--text)", "labelFontSize": 11.5, "labelLimit": 0,
        "orient": "bottom", "title": None, "symbolStrokeWidth": 2, "symbolOpacity": 1, "symbolSize": 60, "aria": False,
    },
    "title": {"color": "var(--text)", "anchor": "start", "fontSize": 13, "limit": WIDTH},
    "mark": {"aria": False},
}  # fmt: skip


@_drawn.register
def _(chart: LineChart) -> Any:
    alt = _altair()
    rows = []
    for line in chart.lines:
        marked = _marked(line.y)
        for i, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            row = {"series": line.label, "x": _finite(x), "y": _finite(y), "marker": int(i in marked)}
            if line.low is not None and line.high is not None:
                row |= {"low": _finite(line.low[i]), "high": _finite(line.high[i])}
            rows.append(row)
    chosen = alt.selection_point(name="chosen", fields=["series"], bind="legend")
    references = [line.label for line in chart.lines if line.is_reference]
    colour, shape, dash = _series([line.label for line in chart.lines], references)
    x_scale = alt.Scale(type="log", nice=False) if chart.is_log else alt.Scale(zero=False, nice=False)
    ticks: dict[str, Any] = {}
    if chart.is_log:
        ticks = {"values": sorted({x for line in chart.lines for x in line.x}), "format": "~g", "labelOverlap": True}
    x = alt.X("x:Q", title=chart.x_label, scale=x_scale, axis=alt.Axis(grid=False, **ticks))
    y = alt.Y("y:Q", title=chart.y_label, scale=alt.Scale(zero=chart.from_zero), axis=alt.Axis(tickCount=6))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, color=colour)
    faint = alt.value(0.15)
    if len(chart.lines) > BANDS:
        faint = alt.condition(chosen, alt.value(0.15), alt.value(0.0), empty=False)
    shown = alt.condition(chosen, alt.value(1.0), alt.value(0.12))
    layers = []
    if any(line.low for line in chart.lines):
        layers.append(base.mark_area().encode(y=alt.Y("low:Q", title=chart.y_label), y2="high:Q", opacity=faint))
    layers.append(base.mark_line(strokeWidth=2).encode(y=y, strokeDash=dash, opacity=shown))
    tips = [
        alt.Tooltip("series:N", title=" "),
        alt.Tooltip("x:Q", title=chart.x_label, format=".6~g"),
        alt.Tooltip("y:Q", title=chart.y_label, format=".5~g"),
    ]
    if any(line.low for line in chart.lines):
        tips += [alt.Tooltip(f"{name}:Q", format=".5~g") for name in ("low", "high")]
    dots = base.transform_filter("datum.marker == 1").mark_point(filled=True, size=45, strokeWidth=0)
    layers.append(dots.encode(y=y, shape=shape, opacity=shown, tooltip=tips))
    return alt.layer(*layers).add_params(chosen)


@_drawn.register
def _(chart: HistogramChart) -> Any:
    alt = _altair()
    rows = [
        {"series": one.label, "x": left, "y": height}
        for one in chart.series
        for left, height in zip(one.edges, [*one.heights, 0.0], strict=True)
    ]
    chosen = alt.selection_point(name="chosen", fields=["series"], bind="legend")
    colour, _, dash = _series([one.label for one in chart.series])
    edges = [e for one in chart.series for e in one.edges]
    x = alt.X("x:Q", title=chart.x_label, scale=alt.Scale(domain=[min(edges), max(edges)], nice=False))
    y = alt.Y("y:Q", title=chart.y_label, scale=alt.Scale(domain=[0, chart.top]), stack=None)
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, color=colour)
    tips = [alt.Tooltip("series:N", title=" ")]
    filled = base.mark_area(interpolate="step-after").encode(
        opacity=alt.condition(chosen, alt.value(0.18), alt.value(0.03)), tooltip=tips
    )
    outline = base.mark_line(interpolate="step-after", strokeWidth=2).encode(
        strokeDash=dash, opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.12))
    )
    return alt.layer(filled, outline).add_params(chosen)


@_drawn.register
def _(chart: ScatterChart) -> Any:
    alt = _altair()
    rows = [
        {"series": g.label, "x": x, "y": y} for g in chart.groups for x, y in zip(g.x, g.y, strict=True)
    ]  # fmt: skip
    across: dict[str, Any] = {"zero": False}
    up = across
    if chart.is_equal:
        domains = equal_scales([x for g in chart.groups for x in g.x], [y for g in chart.groups for y in g.y])
        across, up = ({"zero": False, "nice": False, "domain": domain} for domain in domains)
    chosen = alt.selection_point(name="chosen", fields=["series"], bind="legend")
    colour, shape, _ = _series([group.label for group in chart.groups])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=18)
        .encode(
            x=alt.X("x:Q", title=chart.x_label, scale=alt.Scale(**across)),
            y=alt.Y("y:Q", title=chart.y_label, scale=alt.Scale(**up)),
            color=colour,
            shape=shape,
            opacity=alt.condition(chosen, alt.value(0.7), alt.value(0.06)),
            tooltip=[alt.Tooltip("series:N", title=" "), *(alt.Tooltip(f"{n}:Q", format=".4~g") for n in "xy")],
        )
        .add_params(chosen)
    )


def equal_scales(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Domains of a narrow picture in which one length is as long across as upwards, a little room around."""
    width, height = NARROW
    tall = max(max(y) - min(y), (max(x) - min(x)) * height / width) * 1.06 or 1.0
    (a, b), half = ((min(x) + max(x)) / 2, (min(y) + max(y)) / 2), tall / 2
    return [a - half * width / height, a + half * width / height], [b - half, b + half]


@_drawn.register
def _(chart: IntervalChart) -> Any:
    alt = _altair()
    rows, dots = [], []
    for row in chart.rows:
        one = {"label": row.label, "series": row.source, "x": _finite(row.value)}
        is_bar = isfinite(row.low) and isfinite(row.high)
        rows.append({**one, "low": row.low if is_bar else None, "high": row.high if is_bar else None})
        dots += [{**one, "x": value} for value in row.runs if isfinite(value)]
    labels = list(dict.fromkeys(row.label for row in chart.rows))
    sources = list(dict.fromkeys(row.source for row in chart.rows))
    scale = alt.Scale(type="log") if chart.is_log else alt.Scale(zero=False)
    y = alt.Y("label:N", title=None, sort=None, axis=alt.Axis(grid=True, gridDash=[1, 4], **_wrapped(labels)))
    x = alt.X("x:Q", title=chart.x_label, scale=scale)
    encoded: dict[str, Any] = {"y": y, "color": alt.value(COLOURS[0])}
    shape: dict[str, Any] = {}
    chosen = alt.selection_point(name="chosen", fields=["series"], bind="legend")
    if len(sources) > 1:
        encoded |= {"yOffset": alt.YOffset("series:N", sort=sources)}
        colour, marker, _ = _series(sources)
        encoded |= {"color": colour, "opacity": alt.condition(chosen, alt.value(1.0), alt.value(0.12))}
        shape = {"shape": marker}
    base = alt.Chart(alt.Data(values=rows)).encode(**encoded)
    tips = [
        alt.Tooltip("label:N", title=" "),
        *([alt.Tooltip("series:N", title="of")] if len(sources) > 1 else []),
        alt.Tooltip("x:Q", title=chart.x_label, format=".5~g"),
        *(alt.Tooltip(f"{name}:Q", format=".5~g") for name in ("low", "high")),
    ]
    layers = []
    if chart.reference is not None:
        line = alt.Chart(alt.Data(values=[{"x": chart.reference}]))
        layers.append(line.mark_rule(color="var(--soft)", strokeWidth=1.5).encode(x=x))
    spans = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=3, opacity=0.55)
    layers.append(spans.encode(x=alt.X("low:Q", title=chart.x_label, scale=scale), x2="high:Q"))
    layers.append(base.mark_point(filled=True, size=80).encode(x=x, tooltip=tips, **shape))
    if dots:
        runs = alt.Chart(alt.Data(values=dots)).mark_point(filled=False, size=22, strokeWidth=1.2, opacity=0.9)
        black = {**encoded, "color": alt.value("var(--text)")}
        layers.append(runs.encode(x=x, tooltip=[alt.Tooltip("x:Q", title="one run", format=".5~g")], **black))
    layered = alt.layer(*layers)
    rows_high = max(_rows_of(labels), len(sources))
    layered = layered.properties(height=alt.Step(11 + 13 * rows_high, **({"for": "position"} if shape else {})))
    return layered.add_params(chosen) if shape else layered


@_drawn.register
def _(chart: HeatMap) -> Any:
    alt = _altair()
    rows = [
        {"row": t.row, "column": t.column, "value": t.value, "text": t.text or f"{t.value:.4g}"} for t in chart.tiles
    ]  # fmt: skip
    labels = list(dict.fromkeys(t.row for t in chart.tiles))
    columns = list(dict.fromkeys(t.column for t in chart.tiles))
    has_text = any(t.text for t in chart.tiles)
    values = [t.value for t in chart.tiles]
    if chart.middle is None:
        colours = alt.Scale(scheme="viridis")
        # Of a scale from dark to light, letters are light on its first half.
        is_dark = f"datum.value < {(min(values) + max(values)) / 2!r}"
    else:
        reach = max(abs(v - chart.middle) for v in values) or 1.0
        ends = [chart.middle - reach, chart.middle + reach]
        colours = alt.Scale(scheme="purpleorange", domain=ends, reverse=True)
        is_dark = f"abs(datum.value - {chart.middle!r}) > {0.7 * reach!r}"
    x = alt.X(
        "column:N", title=chart.x_label or None, sort=None,
        axis=alt.Axis(labelAngle=-40 if len("".join(columns)) > 60 else 0, labelOverlap=True, **_wrapped(columns)),
    )  # fmt: skip
    y = alt.Y("row:N", title=chart.y_label or None, sort=None, axis=alt.Axis(**_wrapped(labels)))
    legend = alt.Legend(title=chart.value_label, titleLimit=WIDTH, gradientLength=180, direction="horizontal")
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    tips = [alt.Tooltip("row:N"), alt.Tooltip("column:N"), alt.Tooltip("text:N", title=chart.value_label)]
    tiles = base.mark_rect().encode(color=alt.Color("value:Q", scale=colours, legend=legend), tooltip=tips)
    if has_text:
        ink = alt.condition(is_dark, alt.value("#ffffff"), alt.value("#101418"))
        tiles += base.mark_text(fontSize=11).encode(text="text:N", color=ink, tooltip=tips)
    width: Any = alt.Step(52) if has_text else max(200, min(WIDTH, 26 * len(columns)))
    return tiles.properties(width=width, height=alt.Step(9 + 13 * _rows_of(labels)))


def _series(labels: Sequence[str], references: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """Colour, marker and dashes of series by their place; a reference is grey and dashed beside them."""
    alt = _altair()
    own = [label for label in labels if label not in references]
    rank = {label: i for i, label in enumerate(own)}
    legend = None
    if len(labels) > 1:
        longest = min(LETTERS, max(map(len, labels)))
        legend = alt.Legend(columns=max(1, int(WIDTH / (34 + 6.7 * longest))), **_wrapped(labels))

    def scale(of: Sequence[Any], reference: Any, group: int = 1) -> Any:
        return alt.Scale(
            domain=list(labels),
            range=[reference if n in references else of[rank[n] // group % len(of)] for n in labels],
        )

    colour = alt.Color("series:N", scale=scale(COLOURS, "var(--soft)"), legend=legend, sort=None)
    shape = alt.Shape("series:N", scale=scale(SHAPES, "stroke"), legend=legend, sort=None)
    dash = alt.StrokeDash("series:N", scale=scale(DASHES, [4, 4], len(COLOURS)), legend=legend, sort=None)
    return colour, shape, dash


def _wrapped(labels: Sequence[str]) -> dict[str, Any]:
    """Settings of an axis or legend that break long labels into lines; the whole is under the pointer."""
    long = {label: _broken(label) for label in labels if len(label) > LETTERS}
    if not long:
        return {}
    return {"labelExpr": f"({json.dumps(long, ensure_ascii=False)})[datum.value] || datum.label"}


def _broken(label: str) -> list[str]:
    return wrap(label, LETTERS, max_lines=ROWS, placeholder=" ...") or [label[:LETTERS]]


def _rows_of(labels: Sequence[str]) -> int:
    return max((len(_broken(label)) if len(label) > LETTERS else 1) for label in labels)


def _marked(values: Sequence[float]) -> set[int]:
    """Places of the markers: about MARKERS, the ends, and values between two that are missing."""
    every = -(-len(values) // MARKERS)
    known = [isfinite(value) for value in values]
    alone = {
        i for i, is_known in enumerate(known)
        if is_known and not (i and known[i - 1]) and not (i + 1 < len(known) and known[i + 1])
    }  # fmt: skip
    return {i for i in range(len(values)) if i % every == 0} | {len(values) - 1} | alone


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _altair() -> Any:
    try:
        import altair
    except ModuleNotFoundError as error:
        raise _missing("Vega-Altair") from error
    return altair


def _converter() -> Any:
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise _missing("vl-convert") from error
    return vl_convert


def _missing(name: str) -> ConfigError:
    return ConfigError(f"the charts of a report need {name}. Install it with: {install_line('report')}")
