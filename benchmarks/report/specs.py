"""One function per kind of chart: from its data to a Vega-Lite spec, as data, with the rows in named data sets."""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from math import ceil, isfinite
from typing import Any

from dipole.benchmarks.report.encoding import (
    CHOSEN,
    COLOURS,
    HEIGHT,
    LETTERS,
    NARROW,
    WIDTH,
    Spec,
    broken,
    rounded,
    row_step,
    series_by,
    tip,
    unless_chosen,
    wrapped,
    wrapped_rows,
)
from dipole.benchmarks.report.kinds import (
    Chart,
    HeatMap,
    HistogramChart,
    IntervalChart,
    LineChart,
    RankChart,
    ScatterChart,
)

# So many markers on a line tell it from others; each holds the values under the pointer.
MARKERS = 10
# Bands of more lines than this lie over each other until one is chosen in the legend.
BANDS = 3
RULE: Spec = {"type": "rule", "color": "var(--soft)", "strokeWidth": 1.5}


@singledispatch
def spec_of(chart: Chart) -> Spec:
    """The Vega-Lite spec of a chart, less what all have in common."""
    raise TypeError(f"no drawing for {type(chart).__name__}")


@spec_of.register
def _(chart: LineChart) -> Spec:
    has_band = any(line.low is not None for line in chart.lines)
    rows: list[Spec] = []
    at = iter(rounded([x for line in chart.lines for x in line.x]))
    # One rounding for what shares an axis.
    values = rounded([v for line in chart.lines for of in (line.y, line.low or (), line.high or ()) for v in of])
    taken = iter(values)
    for line in chart.lines:
        marked = _marked(line.y)
        y, low, high = ([next(taken) for _ in of] for of in (line.y, line.low or (), line.high or ()))
        for i, value in enumerate(y):
            row = {"series": line.label, "x": next(at), "y": value, "marker": int(i in marked)}
            rows.append(row | ({"low": low[i], "high": high[i]} if low and high else {}))
    references = [line.label for line in chart.lines if line.is_reference]
    colour, shape, dash = series_by([line.label for line in chart.lines], references)
    x_axis: Spec = {"grid": False}
    x_scale: Spec = {"zero": False, "nice": False}
    if chart.is_log:
        x_scale = {"type": "log", "nice": False}
        x_axis |= {"values": sorted({x for line in chart.lines for x in line.x}), "format": "~g", "labelOverlap": True}
    x = _number("x", chart.x_label, scale=x_scale, axis=x_axis)
    y_scale: Spec = {"type": "log"} if chart.is_log_y else {"zero": chart.from_zero}
    y_channel = _number("y", chart.y_label, scale=y_scale, axis={"tickCount": 6})
    shown = unless_chosen(1.0, 0.12)
    faint: Spec = {"value": 0.15} if len(chart.lines) <= BANDS else unless_chosen(0.15, 0.0, is_empty_all=False)
    step: Spec = {"interpolate": "step-after"} if chart.is_steps else {}
    layers: list[Spec] = []
    if has_band:
        band = {"y": {**y_channel, "field": "low"}, "y2": {"field": "high"}, "opacity": faint}
        layers.append({"mark": {"type": "area", **step}, "encoding": band})
    drawn = {"y": y_channel, "strokeDash": dash, "opacity": shown}
    layers.append({"mark": {"type": "line", "strokeWidth": 2, **step}, "encoding": drawn})
    tips = [tip("series", " "), tip("x", chart.x_label, ".6~g"), tip("y", chart.y_label, ".5~g")]
    tips += [tip(name, form=".5~g") for name in ("low", "high")] if has_band else []
    layers.append(
        {
            "transform": [{"filter": "datum.marker == 1"}],
            "mark": {"type": "point", "filled": True, "size": 45, "strokeWidth": 0},
            "encoding": {"y": y_channel, "shape": shape, "opacity": shown, "tooltip": tips},
        }
    )
    width, height = NARROW if chart.is_narrow else (WIDTH, HEIGHT)
    found = _layered({"rows": rows}, "rows", {"x": x, "color": colour}, layers, is_chosen=True)
    return {**found, "width": width, "height": height}


@spec_of.register
def _(chart: HistogramChart) -> Spec:
    heights = iter(rounded([h for one in chart.series for h in [*one.heights, 0.0]]))
    rows = [{"series": one.label, "x": left, "y": next(heights)} for one in chart.series for left in one.edges]
    colour, _, dash = series_by([one.label for one in chart.series])
    edges = [e for one in chart.series for e in one.edges]
    shared = {
        "x": _number("x", chart.x_label, scale={"domain": [min(edges), max(edges)], "nice": False}),
        "y": _number("y", chart.y_label, scale={"domain": [0, chart.top]}) | {"stack": None},
        "color": colour,
    }
    filled = {"opacity": unless_chosen(0.18, 0.03), "tooltip": [tip("series", " ")]}
    outline = {"strokeDash": dash, "opacity": unless_chosen(1.0, 0.12)}
    layers = [
        {"mark": {"type": "area", "interpolate": "step-after"}, "encoding": filled},
        {"mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2}, "encoding": outline},
    ]
    width, height = NARROW
    return {**_layered({"rows": rows}, "rows", shared, layers, is_chosen=True), "width": width, "height": height}


@spec_of.register
def _(chart: ScatterChart) -> Spec:
    xs = [x for group in chart.groups for x in group.x]
    ys = [y for group in chart.groups for y in group.y]
    labels = [group.label for group in chart.groups for _ in group.x]
    rows = [{"series": s, "x": x, "y": y} for s, x, y in zip(labels, rounded(xs), rounded(ys), strict=True)]
    across: Spec = {"zero": False}
    up = across
    if chart.is_equal:
        across, up = ({"zero": False, "nice": False, "domain": domain} for domain in equal_scales(xs, ys))
    colour, shape, _ = series_by([group.label for group in chart.groups])
    width, height = NARROW
    return {
        "datasets": {"rows": rows},
        "data": {"name": "rows"},
        "params": [CHOSEN],
        "mark": {"type": "point", "filled": True, "size": 18},
        "encoding": {
            "x": _number("x", chart.x_label, scale=across),
            "y": _number("y", chart.y_label, scale=up),
            "color": colour,
            "shape": shape,
            "opacity": unless_chosen(0.7, 0.06),
            "tooltip": [tip("series", " "), tip("x", form=".4~g"), tip("y", form=".4~g")],
        },
        "width": width,
        "height": height,
    }


def equal_scales(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Domains of a narrow picture in which one length is as long across as upwards, a little room around."""
    width, height = NARROW
    tall = max(max(y) - min(y), (max(x) - min(x)) * height / width) * 1.06 or 1.0
    (a, b), half = ((min(x) + max(x)) / 2, (min(y) + max(y)) / 2), tall / 2
    return [a - half * width / height, a + half * width / height], [b - half, b + half]


@spec_of.register
def _(chart: IntervalChart) -> Spec:
    rows: list[Spec] = []
    dots: list[Spec] = []
    numbers = [v for row in chart.rows for v in (row.value, row.low, row.high, *row.runs)]
    taken = iter(rounded(numbers))
    for row in chart.rows:
        value, low, high, *runs = (next(taken) for _ in range(3 + len(row.runs)))
        one = {"label": row.label, "series": row.source}
        has_bar = low is not None and high is not None
        rows.append({**one, "x": value, "low": low if has_bar else None, "high": high if has_bar else None})
        dots += [{**one, "x": each} for each in runs if each is not None]
    labels = list(dict.fromkeys(row.label for row in chart.rows))
    sources = list(dict.fromkeys(row.source for row in chart.rows))
    scale: Spec = {"type": "log"} if chart.is_log else {"zero": False}
    axis = {"grid": True, "gridDash": [1, 4], **wrapped_rows(labels)}
    shared: Spec = {"y": {"field": "label", "type": "nominal", "title": None, "sort": None, "axis": axis}}
    shape: Spec = {}
    if len(sources) > 1:
        colour, marker, _ = series_by(sources)
        shared["yOffset"] = {"field": "series", "type": "nominal", "sort": sources}
        shared |= {"color": colour, "opacity": unless_chosen(1.0, 0.12)}
        shape = {"shape": marker}
    else:
        shared["color"] = {"value": COLOURS[0]}
    x = _number("x", chart.x_label, scale=scale)
    tips = [
        tip("label", " "),
        *([tip("series", "of")] if shape else []),
        tip("x", chart.x_label, ".5~g"),
        *(tip(name, form=".5~g") for name in ("low", "high")),
    ]
    layers: list[Spec] = []
    if chart.reference is not None:
        layers.append({"data": {"values": [{"x": chart.reference}]}, "mark": RULE, "encoding": {"x": x}})
    if dots:
        # Seeds by the dozen are small and let those below shine through; few are rings that are counted.
        mark: Spec = {"type": "point", "filled": False, "size": 22, "strokeWidth": 1.2, "opacity": 0.9}
        dot = {**shared, "color": {"value": "var(--text)"}, "x": x, "tooltip": [tip("x", "one run", ".5~g")]}
        dot.pop("opacity", None)
        if max(len(row.runs) for row in chart.rows) > MANY:
            mark |= {"size": 10, "strokeWidth": 0.9, "opacity": 0.45}
            dot["color"] = {"value": "var(--soft)"}
    span = {**shared, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    layers.append(
        {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.55},
            "encoding": span,
        }
    )
    point = {**shared, "x": x, "tooltip": tips, **shape}
    layers.append({"mark": {"type": "point", "filled": True, "size": 80}, "encoding": point})
    if dots:
        # Many lie below what they add up to, few on it.
        place = len(layers) - 2 if mark["size"] < 20 else len(layers)
        layers.insert(place, {"data": {"name": "dots"}, "mark": mark, "encoding": dot})
    data = {"rows": rows, **({"dots": dots} if dots else {})}
    found = _layered(data, "rows", {}, layers, is_chosen=bool(shape))
    step = max(row_step(labels), 11 + 13 * len(sources))
    # Names and intervals share the width, so that long names do not make the picture, and its letters, smaller.
    return {
        **found,
        "width": _beside(labels),
        "height": {"step": step, **({"for": "position"} if shape else {})},
    }


# From so many seeds on their dots lie on each other.
MANY = 12


@spec_of.register
def _(chart: RankChart) -> Spec:
    """Mean ranks below each other, best first; bars beside them join those that the test does not tell apart."""
    labels = [row.label for row in chart.rows]
    rows = [{"label": row.label, "x": round(row.rank, 3)} for row in chart.rows]
    last = max(row.rank for row in chart.rows)
    first = min(row.rank for row in chart.rows)
    # The bars stand behind the worst rank, a place each.
    room = 0.06 * max(last - first, 0.5)
    bars = [
        {"x": last + (i + 1.5) * room, "label": labels[a], "end": labels[b], "group": f"{labels[a]} to {labels[b]}"}
        for i, (a, b) in enumerate(chart.groups)
    ]
    domain = [first - room, last + (len(bars) + 1.5) * room]
    axis = {"grid": True, "gridDash": [1, 4], **wrapped_rows(labels)}
    y: Spec = {"field": "label", "type": "nominal", "title": None, "scale": {"domain": labels}, "axis": axis}
    x = _number("x", chart.x_label, scale={"domain": domain, "nice": False, "zero": False}, axis={"tickMinStep": 0.5})
    layers: list[Spec] = [
        {
            "mark": {"type": "point", "filled": True, "size": 80},
            "encoding": {
                "x": x, "y": y, "color": {"value": COLOURS[0]},
                "tooltip": [tip("label", " "), tip("x", "mean rank", ".3~g")],
            },
        },
        {
            "data": {"name": "bars"},
            "mark": {"type": "rule", "strokeWidth": 5, "strokeCap": "round"},
            "encoding": {
                "x": x, "y": y, "y2": {"field": "end"}, "color": {"value": COLOURS[1]},
                "tooltip": [tip("group", "not told apart")],
            },
        },
    ]  # fmt: skip
    found = _layered({"rows": rows, "bars": bars}, "rows", {}, layers)
    return {**found, "width": _beside(labels), "height": {"step": row_step(labels)}}


@spec_of.register
def _(chart: HeatMap) -> Spec:
    values = rounded([t.value for t in chart.tiles])
    known = [value for value in values if value is not None]
    has_text = any(t.text for t in chart.tiles)
    rows = [
        {"row": t.row, "column": t.column, "value": value, **({"text": t.text} if has_text else {})}
        for t, value in zip(chart.tiles, values, strict=True)
    ]
    labels = list(dict.fromkeys(t.row for t in chart.tiles))
    names = _in_order(list(dict.fromkeys(t.column for t in chart.tiles)))
    if chart.middle is None:
        colours: Spec = {"scheme": "viridis"}
        # Of a scale from dark to light, letters are light on its first half.
        is_dark = f"datum.value < {(min(known) + max(known)) / 2!r}"
    else:
        reach = max(abs(v - chart.middle) for v in known) or 1.0
        ends = [chart.middle - reach, chart.middle + reach]
        colours = {"scheme": "purpleorange", "domain": ends, "reverse": True}
        is_dark = f"abs(datum.value - {chart.middle!r}) > {0.7 * reach!r}"
    step = 52 if has_text else max(200, min(_beside(labels), 26 * len(names))) / len(names)
    # Numbers in their order may be left out where there is no room, names may not.
    is_number = names and _is_number(names[0])
    is_long = not is_number and max(map(len, names)) * 6.2 > step
    x_axis = {"labelAngle": -40 if is_long else 0, "labelOverlap": False, **wrapped(names)}
    if is_number:
        x_axis["values"] = names[:: ceil((max(map(len, names)) * 6.2 + 6) / step)]
    tips = [
        tip("row", chart.y_label or "row"),
        tip("column", chart.x_label or "column"),
        tip("text", chart.value_label) if has_text else tip("value", chart.value_label, ".4~g"),
    ]
    shared: Spec = {
        "x": {"field": "column", "type": "nominal", "title": chart.x_label or None, "sort": names, "axis": x_axis},
        "y": {
            "field": "row", "type": "nominal", "title": chart.y_label or None, "sort": None,
            "axis": wrapped_rows(labels),
        },
        "tooltip": tips,
    }  # fmt: skip
    title = broken_title(chart.value_label)
    legend = {"title": title, "titleLimit": 0, "gradientLength": 180, "direction": "horizontal"}
    colour = {"field": "value", "type": "quantitative", "scale": colours, "legend": legend}
    layers: list[Spec] = [{"mark": "rect", "encoding": {"color": colour}}]
    if has_text:
        ink = {"condition": {"test": is_dark, "value": "#ffffff"}, "value": "#101418"}
        text = {"text": {"field": "text", "type": "nominal"}, "color": ink}
        layers.append({"mark": {"type": "text", "fontSize": 11}, "encoding": text})
    width: Any = {"step": 52} if has_text else round(step * len(names))
    found = _layered({"rows": rows}, "rows", shared, layers)
    return {**found, "width": width, "height": {"step": row_step(labels) - 2}}


def _in_order(names: list[str]) -> list[str]:
    """Numbers by size, as a row may lack some; other names as they come."""
    try:
        return sorted(names, key=float)
    except ValueError:
        return names


def _is_number(name: str) -> bool:
    try:
        return isfinite(float(name))
    except ValueError:
        return False


def broken_title(text: str) -> str | list[str]:
    """A title in lines no longer than the picture."""
    lines = broken(text) if len(text) > 60 else [text]
    return lines if len(lines) > 1 else text


def _beside(labels: Sequence[str]) -> int:
    """Width that names of these lengths leave for what stands beside them."""
    return WIDTH + 40 - int(6.2 * max(min(len(label), LETTERS) for label in labels))


def _layered(
    data: Mapping[str, Sequence[Spec]], first: str, shared: Spec, layers: Sequence[Spec], is_chosen: bool = False
) -> Spec:
    """Layers over one data set, with the channels that all share; the first layer holds the choice in the legend."""
    held: list[Spec] = [{**layer} for layer in layers]
    if is_chosen:
        held[-1]["params"] = [CHOSEN]
    found: Spec = {"datasets": dict(data), "data": {"name": first}, "layer": held}
    return {**found, "encoding": shared} if shared else found


def _number(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _marked(values: Sequence[float]) -> set[int]:
    """Places of the markers: about MARKERS, the ends, and values between two that are missing."""
    every = -(-len(values) // MARKERS)
    known = [isfinite(value) for value in values]
    alone = {
        i for i, is_known in enumerate(known)
        if is_known and not (i and known[i - 1]) and not (i + 1 < len(known) and known[i + 1])
    }  # fmt: skip
    return {i for i in range(len(values)) if i % every == 0} | {len(values) - 1} | alone
