"""A report as one HTML file: styles, script and pictures are inside."""

import base64
import hashlib
import json
from collections.abc import Callable
from html import escape
from importlib.resources import files
from typing import Any

from dipole import __version__
from dipole.benchmarks.report import drawing
from dipole.benchmarks.report.document import Report
from dipole.benchmarks.report.kinds import Chart
from dipole.core.ground.errors import ConfigError
from dipole.core.ground.extras import install_line


def to_html(report: Report) -> str:
    """One file without any reference to another: styles, script and pictures are inside.

    Every picture is there as SVG, which needs no script; its spec beside it is what Vega draws under the pointer.

    Raises:
        ConfigError: Jinja or, where there is something to draw, Vega-Altair is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ConfigError(f"the HTML report needs Jinja. Install it with: {install_line('report')}") from error
    has_charts = any(section.pictures for section in report.sections)
    style, script = _template("report.css"), _template("report.js")
    if has_charts:
        config = f"const CHART_CONFIG = {json.dumps(drawing.CONFIG)};"
        script = "\n".join((drawing.runtime(), config, script, _template("charts.js")))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("dipole.benchmarks", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The only texts that bypass escaping: our own files, and charts, which escape what they are given.
    trusted: Callable[[str], Any] = Markup
    return environment.get_template("report.html").render(
        report=report,
        version=__version__,
        script=trusted(script),
        script_hash=digest,
        style=trusted(style),
        drawn=lambda chart: trusted(_drawn(chart)),
        is_number=lambda value: isinstance(value, int | float),
    )


def _drawn(chart: Chart) -> str:
    """A chart as SVG, and its spec in a template, which browsers neither show nor run."""
    spec = drawing.spec(chart)
    data = json.dumps(spec, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        data = data.replace(char, f"\\u{ord(char):04x}")
    name = escape(chart.description, quote=True)
    svg = drawing.to_svg(spec).replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    return f'<div class="drawn">{svg}</div><template>{data}</template>'


def _template(name: str) -> str:
    return files("dipole.benchmarks").joinpath("templates", name).read_text(encoding="utf-8")
