"""Charts drawn by Vega-Lite: a chart as a spec, a spec as SVG and PDF, and the runtime for the page.

Colours are names of the page's style sheet (`var(--c0)`), so that one picture serves light, dark and print; files get
the light ones.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from dipole.benchmarks.report.encoding import WIDTH, Spec
from dipole.benchmarks.report.kinds import Chart
from dipole.benchmarks.report.specs import spec_of
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line

# Widths of its letters are those that vl-convert measures with, so that no label is cut in a browser.
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def spec(chart: Chart) -> Spec:
    """The Vega-Lite spec of a chart, with its data in named data sets."""
    return {"description": chart.description, **spec_of(chart)}


def to_svg(drawn: Mapping[str, Any]) -> str:
    """A spec as SVG, in the names of colours of the page.

    Raises:
        ConfigError: vl-convert is not installed.
    """
    svg: str = _converter().vegalite_to_svg({**drawn, "config": CONFIG})
    return svg


def to_files(chart: Chart) -> dict[str, str | bytes]:
    """A chart as files, by suffix: SVG, PDF and Vega-Lite spec, in the light colours, with title and description."""
    titled = {**spec(chart), "title": chart.title}
    svg = with_colours(to_svg(titled), light())
    told = f"<title>{escape(chart.title)}</title><desc>{escape(chart.description)}</desc>"
    svg = re.sub(r"(<svg[^>]*>)", lambda m: m[1] + told, svg, count=1)
    written = json.dumps({"$schema": SCHEMA, **titled, "config": CONFIG}, indent=1, allow_nan=False)
    return {".svg": svg, ".pdf": _converter().svg_to_pdf(svg), ".vl.json": _coloured(written, light())}


def with_colours(svg: str, colours: Mapping[str, str]) -> str:
    """Names of colours replaced by the colours; a white ground."""
    found = _coloured(svg, colours)
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', found, count=1)


def _coloured(text: str, colours: Mapping[str, str]) -> str:
    return re.sub(r"var\(--([a-z0-9]+)\)", lambda m: colours[m[1]], text)


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


def _converter() -> Any:
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        message = f"the charts of a report need vl-convert. Install it with: {install_line('report')}"
        raise ConfigError(message) from error
    return vl_convert
