"""A chart, what all chart types share (style of series, long labels in lines), and charts as pictures and files.

Colours are names of the page's style sheet (`var(--c0)`), so one picture serves light, dark and print.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from html import escape
from itertools import accumulate
from math import isfinite
from textwrap import wrap
from typing import Any, TypeVar

from dipole.benchmarks.report.table import Cell, ReportTable, count_cell, number_cell, template
from dipole.core.utils.cache import kept_json
from dipole.core.utils.extras import needing
from dipole.core.utils.text import printable

WIDTH, HEIGHT = 420, 240
NARROW = 280, 190  # size of pictures that stand three in a row
COLOURS = [f"var(--c{i})" for i in range(8)]
TEXT, SOFT = "var(--text)", "var(--soft)"
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
DASHES = [[1, 0], [7, 4], [2, 3], [8, 3, 2, 3]]
LETTERS, LINES = 36, 3  # longest line of a label, and the most lines of it
LETTER_WIDTH = 6.2
SPARE = 0.25  # share by which letters of another font may be wider than those that labels are measured with
CHOICE: dict[str, Any] = {
    "name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend", "views": ["series"]
}  # fmt: skip
"""The selection that a click in the legend makes, over the layer of this name. Altair would copy all layers for it."""
NAMED = 12  # so many values are read out in a description
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
MOST_LINES = 10  # more lines than this become rows of a heat map
MOST_ROWS = 30  # most rows of a picture
DRAWN = 12  # So many pictures of a kind the page draws at once, the others on request. A large one counts as three.


# The widths of its font's letters are those that vl-convert measures with, so no label is cut in a browser.
CONFIG: dict[str, Any] = json.loads(template("theme.json"))

Rows = list[dict[str, Any]]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Chart:
    """One chart: the data as Vega reads them, words, and a function of the module `altair` that returns the drawing."""

    title: str
    x_label: str
    y_label: str  # or "" if the y axis has names of rows
    rows: Rows
    shown: str  # the contents in words, for readers who cannot see the picture
    draw: Callable[[Any], dict[str, Any]] = field(repr=False)
    columns: Mapping[str, str] = field(default_factory=dict)  # names of the fields of `rows` in the table of numbers
    datasets: Mapping[str, Rows] = field(default_factory=dict)
    is_narrow: bool = False  # three fit in a row
    is_large: bool = False  # it counts as three of those that a page draws at once
    table: ReportTable | None = None  # of numbers, in place of `columns`

    @property
    def description(self) -> str:
        return printable(f"{self.title}: {self.y_label or 'rows'} over {self.x_label}. {self.shown}")

    def numbers(self) -> ReportTable:
        if self.table is not None:
            return replace(self.table, title=self.title, note=self.description)
        rows = [tuple(_cell(row.get(name)) for name in self.columns) for row in self.rows]
        table = ReportTable("", self.title, tuple(self.columns.values()), rows, self.description)
        return table.without_empty_columns()

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite spec, without configuration: the page and the files have one each."""
        library = altair()
        with library.utils.schemapi.debug_mode(False):  # checking each part against the schema doubles the time
            drawn = self.draw(library)
        # Altair would copy the rows several times.
        about = {"description": self.description, "padding": self.padding}
        spec = {**about, "datasets": {"rows": self.rows, **self.datasets}, **drawn}
        if any(layer.get("name") == CHOICE["views"][0] for layer in drawn["layer"]):
            spec["params"] = [CHOICE]
        text = json.dumps(spec, ensure_ascii=False)
        return spec if text.isprintable() and "\\" not in text else _printable(spec)

    @property
    def padding(self) -> dict[str, int]:
        """The space around the drawing. A browser without the font that labels are measured with draws them wider."""
        left = [row.get(name) for name in ("label", "row") for row in self.rows]
        right = [row.get(name) for name in ("series", "column") for row in self.rows]
        title = LETTER_WIDTH * (1 + SPARE) * max(len(self.x_label), len(self.y_label))
        over = max(0.0, title - WIDTH) / 2
        return {"top": 5, "bottom": 5, "left": _spare(left, over), "right": _spare(right, over)}


@dataclass(frozen=True)
class Picture:
    """A chart and its caption. `note` is shown once above all pictures of a kind."""

    chart: Chart
    caption: str
    note: str = ""


def pictured(chart: Chart | None, caption: str, note: str = "") -> list[Picture]:
    """Return a list of one picture, or an empty list if there is nothing to draw."""
    return [] if chart is None else [Picture(chart, caption, note)]


def drawn_at_once(pictures: Sequence[Picture]) -> int:
    """Return how many of the first pictures of a kind the page draws."""
    spent = accumulate(1 + 2 * picture.chart.is_large for picture in pictures)
    return sum(each <= DRAWN for each in spent)


def ends(items: Sequence[Item], value: Callable[[Item], float], what: str) -> tuple[list[Item], str]:
    """Return all items, or the largest and smallest in their order if there are too many, and a note."""
    if len(items) <= MOST_ROWS:
        return list(items), ""
    ordered = sorted(range(len(items)), key=lambda i: value(items[i]))
    half = MOST_ROWS // 2
    kept = {*ordered[:half], *ordered[-half:]}
    return [item for i, item in enumerate(items) if i in kept], (
        f"{MOST_ROWS} of {len(items)} {what}: the {half} largest and the {half} smallest. The tables have all."
    )


def _spare(labels: Iterable[Any], least: float) -> int:
    """Return the pixels for labels that are wider than measured."""
    widest = max((min(len(str(label)), LETTERS) for label in labels), default=0)
    return 5 + round(max(SPARE * LETTER_WIDTH * widest, least))


def _printable(value: Any) -> Any:
    """Write control characters of all strings as escapes: SVG cannot hold them, and drawing one ends the process."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(each) for each in value]
    return value


def altair() -> Any:
    """Import Altair when a chart is drawn: nothing else needs it. ConfigError if it is not installed."""
    with needing("report", "a chart"):
        import altair
    return altair


def short(value: float | None) -> float | None:
    """Return a number with the six digits that a picture needs, or None if it is not finite."""
    if value is None or not isfinite(value):
        return None
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}")


def values_of(rows: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def unless_chosen(shown: float, faint: float, **more: bool) -> Any:
    """Return `shown` for the series chosen in the legend, or without a choice for all, and `faint` for the others."""
    return altair().OpacityValue(faint, condition={"param": "chosen", "value": shown, **more})


def tip(name: str, title: str | None = None, number_format: str | None = None) -> Any:
    """Return one line of a tooltip: a name, or a number if it has a format."""
    if number_format:
        return altair().Tooltip(f"{name}:Q", title=title or name, format=number_format)
    return altair().Tooltip(f"{name}:N", title=title or name)


def series_by(labels: Sequence[str], references: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """Return colour, marker and dashes of series by their place. Reference series are grey and dashed."""
    alt = altair()
    own = [label for label in labels if label not in references]
    legend = None
    if len(labels) > 1:
        longest = min(LETTERS, max(map(len, labels)))
        legend = alt.Legend(columns=max(1, int(WIDTH / (34 + 6.7 * longest))), **wrapped(labels))

    def channel(kind: Any, values: Sequence[Any], reference: Any, repeat: int = 1) -> Any:
        of = {label: values[i // repeat % len(values)] for i, label in enumerate(own)}
        scale = alt.Scale(domain=list(labels), range=[of.get(label, reference) for label in labels])
        return kind("series:N", scale=scale, legend=legend, sort=None)

    return (
        channel(alt.Color, COLOURS, SOFT),
        channel(alt.Shape, SHAPES, "stroke"),
        channel(alt.StrokeDash, DASHES, [4, 4], len(COLOURS)),
    )


def wrapped(labels: Sequence[str]) -> dict[str, Any]:
    """Return settings of an axis or legend that break long labels into lines."""
    long = {label: broken(label) for label in labels if len(label) > LETTERS}
    if not long:
        return {}
    return {"labelExpr": f"({json.dumps(long, ensure_ascii=False)})[datum.value] || datum.label"}


def row_axis(labels: Sequence[str], **more: Any) -> Any:
    """Return the axis of names of rows. The lines of long names are centred on their row."""
    alt = altair()
    lifted = [
        {"test": f"datum.value === {json.dumps(label, ensure_ascii=False)}", "value": -6.5 * (len(broken(label)) - 1)}
        for label in labels
        if len(broken(label)) > 1
    ]
    if lifted:
        more["labelOffset"] = alt.ConditionalAxisNumber(condition=lifted, value=0)
    return alt.Axis(**wrapped(labels), **more)


def broken(label: str) -> list[str]:
    """Break a label into lines of at most LETTERS letters. Three dots mark what is cut off."""
    if len(label) <= LETTERS:
        return [label]
    return wrap(label, LETTERS, max_lines=LINES, placeholder=" ...") or [label[:LETTERS]]


def row_step(labels: Sequence[str]) -> int:
    """Return the pixels from row to row that these labels need."""
    return max(24, 13 * max(len(broken(label)) for label in labels) + 5)


def width_beside(labels: Sequence[str]) -> int:
    """Return the width that row names leave for the drawing: long names must not make its letters smaller."""
    return WIDTH + 40 - int(LETTER_WIDTH * max(min(len(label), LETTERS) for label in labels))


def first_of(names: Sequence[str], count: int) -> str:
    """Return the first `count` names as text, and how many more there are."""
    text = ", ".join(names[:count])
    if len(names) > count:
        text += f" and {len(names) - count} more"
    return text


def layered(layers: Sequence[Any], width: Any, height: Any, **shared: Any) -> dict[str, Any]:
    """Return layers over the data set `rows`, with the channels that they share."""
    alt = altair()
    encoding = alt.FacetedEncoding(**shared) if shared else alt.Undefined
    data = alt.NamedData("rows")
    # `alt.layer` and `encode` would copy all layers.
    spec = alt.LayerSpec(layer=layers, data=data, width=width, height=height, encoding=encoding)
    drawn: dict[str, Any] = spec.to_dict(validate=False, context={"top_level": False, "data": data})
    return drawn


def _cell(value: str | float | None) -> Cell:
    if isinstance(value, str):
        return Cell(value)
    return count_cell(value) if isinstance(value, int) else number_cell(value)


def to_svg(spec: Mapping[str, Any]) -> str:
    """Return a spec as SVG, with the page's names of colours. Raise ConfigError if vl-convert is not installed."""
    svg: str = _converter().vegalite_to_svg({**spec, "config": CONFIG})
    return svg


def to_files(chart: Chart) -> dict[str, str | bytes]:
    """Return a chart as files by suffix: SVG, PDF and Vega-Lite spec, in the light colours, with its title."""
    title = re.sub("[\U00010000-\U0010ffff]", "?", printable(chart.title))  # vl-convert fails if it cuts one in two
    titled = {**chart.spec, "title": title}
    svg = with_colours(to_svg(titled), light())
    about = f"<title>{escape(title)}</title><desc>{escape(chart.description)}</desc>"
    svg = re.sub(r"(<svg[^>]*>)", lambda m: m[1] + about, svg, count=1)
    written = json.dumps({"$schema": SCHEMA, **titled, "config": CONFIG}, indent=1, allow_nan=False)
    return {".svg": svg, ".pdf": _converter().svg_to_pdf(svg), ".vl.json": _coloured(written, light())}


def with_colours(svg: str, colours: Mapping[str, str]) -> str:
    """Replace names of colours by the colours, on a white ground."""
    found = _coloured(svg, colours)
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', found, count=1)


def _coloured(text: str, colours: Mapping[str, str]) -> str:
    return re.sub(r"var\(--([a-z0-9]+)\)", lambda m: colours[m[1]], text)


@cache
def light() -> Mapping[str, str]:
    sheet = template("report.css").partition("}")[0]
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", sheet))


@cache
def runtime() -> str:
    """Return Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) as one script, for the page."""
    converter = _converter()
    release = hashlib.sha256(converter.__version__.encode()).hexdigest()
    bundle: str = kept_json("vega", release[:16], converter.javascript_bundle)  # which takes two seconds
    return bundle.replace("</script", "<\\/script")


def _converter() -> Any:
    with needing("report", "a chart"):
        import vl_convert
    return vl_convert
