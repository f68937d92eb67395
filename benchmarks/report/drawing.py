"""Charts as pictures: a Vega-Lite spec as SVG and PDF, and Vega itself for the page."""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from dipole.benchmarks.report.chart import SOFT, TEXT, WIDTH, Chart
from dipole.core.utils.cache import kept_json
from dipole.core.utils.extras import needing
from dipole.core.utils.text import printable

# The widths of its letters are those that vl-convert measures with, so no label is cut in a browser.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
AXIS = {
    "labelColor": TEXT, "titleColor": TEXT, "gridColor": "var(--line)", "tickColor": SOFT, "domainColor": SOFT,
    "labelFontSize": 11.5, "titleFontSize": 12.5, "titleFontWeight": "normal", "labelLimit": 0, "titleLimit": 0,
    "labelFlush": False, "aria": False,
}  # fmt: skip
LEGEND = {
    "labelColor": TEXT, "titleColor": TEXT, "labelFontSize": 11.5, "labelLimit": 0, "orient": "bottom", "title": None,
    "symbolStrokeWidth": 2, "symbolOpacity": 1, "symbolSize": 60, "aria": False,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": AXIS,
    "legend": LEGEND,
    "title": {"color": TEXT, "anchor": "start", "fontSize": 13, "limit": WIDTH},
    "mark": {"aria": False},
}


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
    """Return the colours that the style sheet has for paper."""
    sheet = files("dipole.benchmarks").joinpath("templates", "report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", sheet.partition("}")[0]))


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
