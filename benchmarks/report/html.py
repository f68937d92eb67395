"""A report as one HTML file: styles, script and pictures are inside."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from dipole.benchmarks.report import chart
from dipole.benchmarks.report.contents import Picture, Report, Section, drawn_at_once
from dipole.benchmarks.report.tables import DETECTABLE
from dipole.core.utils.extras import needing
from dipole.core.utils.text import printable
from dipole.core.utils.version import __version__

RUNTIME = "vega.js"
"""Vega in the folder of a report of several pages, once for all of them."""


def to_html(report: Report) -> str:
    """Return the report as one HTML file that needs no other file.

    The first pictures of a kind are SVG and need no script. Vega draws their specs when the pointer is over them, and
    draws the other pictures when they are unfolded. Raise ConfigError if Jinja or, if there is something to draw,
    Vega-Altair is not installed.
    """
    return _page(report, report.sections, "#{}".format)


def to_pages(report: Report, name: str) -> dict[str, str]:
    """Return a report of many suites as several files by path: NAME.html is the index, NAME/SUITE.html a suite."""
    suites = [section for section in report.sections if section.is_suite]
    others = [section for section in report.sections if not section.is_suite]
    found = {f"{name}.html": _page(report, others, f"{name}/{{}}.html".format)}
    if any(section.pictures for section in suites):
        found[f"{name}/{RUNTIME}"] = chart.runtime()
    for section in suites:
        page = replace(report, title=section.title, sections=[section], facts={}, machines="", summary="")
        found[f"{name}/{section.id}.html"] = _page(page, [section], "{}.html".format, f"../{name}.html")
    return found


def _page(report: Report, sections: Sequence[Section], link: Callable[[str], str], index: str = "") -> str:
    """Return one page with these sections. `link` gives the address of a suite. A suite's page has an `index`."""
    with needing("report", "the HTML report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    has_charts = any(section.pictures for section in sections)
    style, script = _template("report.css"), _template("report.js")
    if has_charts:
        config = f"const CHART_CONFIG = {json.dumps(chart.CONFIG)};"
        script = "\n".join(([] if index else [chart.runtime()]) + [config, script, _template("charts.js")])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("dipole.benchmarks", "templates"),
        autoescape=True,
        # Control characters of a text become escapes. Our own files and charts are Markup, which stays.
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The only texts that bypass escaping: our own files, and charts, which escape what they are given.
    trusted: Callable[[str], Any] = Markup
    return environment.get_template("report.html").render(
        report=report,
        sections=sections,
        link=link,
        index=index,
        runtime=RUNTIME if index and has_charts else "",
        version=__version__,
        script=trusted(script),
        script_hash=digest,
        style=trusted(style),
        drawn=lambda picture, is_now: trusted(_drawn(picture, is_now)),
        at_once=drawn_at_once,
        notes=lambda pictures: list(dict.fromkeys(picture.note for picture in pictures if picture.note)),
        is_number=lambda value: isinstance(value, int | float),
        last=DETECTABLE,
    )


def _drawn(picture: Picture, is_now: bool) -> str:
    """Return a chart as SVG if it is drawn now, and its spec in a template element."""
    spec = picture.chart.spec
    name = escape(picture.chart.description, quote=True)
    packed = {**spec, "datasets": {key: _packed(rows) for key, rows in spec["datasets"].items()}}
    data = json.dumps(packed, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    label = f'role="img" aria-label="{name}"'
    drawn = f'<div class="drawn" {label}></div>'
    if is_now:
        drawn = f'<div class="drawn">{chart.to_svg(spec).replace("<svg ", f"<svg {label} ", 1)}</div>'
    return f"{drawn}<template>{data}</template>"


def _packed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as columns with repeated texts as indices. charts.js unpacks them."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        texts: list[Any] = list(dict.fromkeys(value for value in values if isinstance(value, str)))
        if len(texts) * 2 < len(values) and all(isinstance(value, str) for value in values):
            found[name] = {"of": texts, "at": [texts.index(value) for value in values]}
        else:
            found[name] = values
    return found


def _template(name: str) -> str:
    return files("dipole.benchmarks").joinpath("templates", name).read_text(encoding="utf-8")
