"""A report as one HTML file: styles, script and pictures are inside."""

import base64
import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from dipole import __version__
from dipole.benchmarks.report.document import Report
from dipole.core.ground.errors import ConfigError
from dipole.core.ground.extras import install_line


def to_html(report: Report) -> str:
    """One file without any reference to another: styles, script and pictures are inside."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ConfigError(f"the HTML report needs Jinja. Install it with: {install_line('report')}") from error
    script, style = _template("report.js"), _template("report.css")
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
        svg=trusted,
        is_number=lambda value: isinstance(value, int | float),
    )


def _template(name: str) -> str:
    return files("dipole.benchmarks").joinpath("templates", name).read_text(encoding="utf-8")
