"""The results that are committed (benchmarks/results/suites), as the tables of a page and as the whole report."""

from __future__ import annotations

import re
from functools import cache

from dipole.benchmarks.keeping import contents
from dipole.benchmarks.kept import SHIPPED
from dipole.benchmarks.report.document import Report, make_report
from dipole.benchmarks.report.html import to_html
from dipole.benchmarks.report.table import to_markdown
from dipole.core.ground.progress import duration

PAGE = "report.html"
SHOWN = ("-ranking", "-results", "-claims")
"""Tables of a suite that stand on the page; the others are in the report."""


@cache
def report() -> Report:
    """The report of all of them."""
    return make_report(SHIPPED)


def page() -> bytes:
    """The report as one file, which the site holds beside its pages."""
    return to_html(report()).encode()


def table() -> str:
    """Markdown: what there is of each suite, and where the whole report is."""
    lines = ["| suite | runs finished | computing time of one core |", "|---|---|---|"]
    lines += [
        f"| `{each.suite}` | {each.runs} of {each.wanted} | {duration(each.seconds)} |" for each in contents([SHIPPED])
    ]
    return "\n".join(lines) + f"\n\n[The whole report]({PAGE}), with every number, chart, run and command, in one file."


def sections() -> str:
    """Markdown: what each suite found, its table beside the paper's, and its claims."""
    parts = []
    for section in report().sections:
        shown = [found for found in section.tables if found.name.endswith(SHOWN)]
        if section.findings and shown:
            parts += [f"## {section.title}", section.subtitle + ".", " ".join(section.findings)]
            parts += [f"- {note}" for note in section.notes]
            parts += [re.sub(r"^#+ ", "### ", to_markdown(found), flags=re.MULTILINE) for found in shown]
    return "\n\n".join(parts)
