"""Tables and the report of the committed results (benchmarks/results/suites)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache

from dipole.benchmarks.gather import gather
from dipole.benchmarks.manifest import RowEntry
from dipole.benchmarks.report.document import Report, Section, make_report
from dipole.benchmarks.report.html import to_html
from dipole.benchmarks.report.ranking import LEVEL
from dipole.benchmarks.report.results import CellResult, SuiteResults
from dipole.benchmarks.report.table import Cell, plain, to_markdown
from dipole.benchmarks.report.tables import results_table
from dipole.benchmarks.results_file import SHIPPED
from dipole.core.utils.text import counted

PAGE = "report.html"
SHOWN = ("-ranking", "-results", "-claims")
"""Tables of a suite on the page. The others are in the report only."""
TERM = re.compile(r"(?:^|[+*])\s*([A-Za-z_][\w-]*)")


def ranking(suite: str) -> str:
    """Return ranking and results of one study as Markdown.

    Raises:
        StopIteration: there are no results of this study.
    """
    section = next(each for each in report().sections if each.id == suite)
    shown = [found for found in section.tables if found.name.endswith(SHOWN[:2])]
    return "\n\n".join(re.sub(r"^### .*", "", to_markdown(found), flags=re.MULTILINE).strip() for found in shown)


def terms(objective: str) -> set[str]:
    """Return the names in an objective's text."""
    return {each.replace("-", "_") for each in TERM.findall(objective)}


@cache
def report() -> Report:
    """Return the report of all committed results."""
    return make_report(SHIPPED)


@cache
def suites() -> list[SuiteResults]:
    """Return all suites sorted by name."""
    gathered = gather([SHIPPED])
    found = [SuiteResults(manifest, gathered.collection.records) for manifest in gathered.manifests]
    return sorted(found, key=lambda each: each.manifest.name)


def page() -> bytes:
    """Return the report as one HTML file for the site."""
    return to_html(report()).encode()


def in_short() -> str:
    """Return one sentence: how many comparisons and claims have a verdict."""
    return report().summary


def overview() -> str:
    """Return the verdicts on the papers' claims, one line per suite, and a link to the report as Markdown."""
    found = next(section for section in report().sections if section.id == "overview")
    shown = {section.id for section in _shown()}
    parts = [report().summary, f"[The report](../{PAGE}), with every number, chart, run and command, is one file."]
    for each in reversed(found.tables):
        rows = [tuple(_linked(cell, shown) for cell in row) for row in each.rows]
        lines = ["| " + " | ".join(cells) + " |" for cells in (each.head, ("---",) * len(each.head), *rows)]
        parts += [f"## {each.title}", each.note, "\n".join(lines)]
    return "\n\n".join(parts)


def sections() -> str:
    """Return findings, tables and claims of each suite as Markdown."""
    parts = []
    for section in _shown():
        parts += [f"### {section.title} {{ #{section.id} }}", section.subtitle + ".", " ".join(section.findings)]
        parts += [f"- {note}" for note in section.notes]
        tables = [found for found in section.tables if found.name.endswith(SHOWN)]
        # Not as headings: the contents of the page are its suites.
        parts += [re.sub(r"^#+ (.*)", r"**\1**", to_markdown(found), flags=re.MULTILINE) for found in tables]
    return "\n\n".join(parts)


def _shown() -> list[Section]:
    """Return the sections with findings and a table."""
    return [
        section
        for section in report().sections
        if section.findings and any(found.name.endswith(SHOWN) for found in section.tables)
    ]


def _linked(cell: Cell, shown: Collection[str]) -> str:
    """Link a cell to its suite on the page, or in the report."""
    text = f"{plain(cell.text)}<br>{plain(cell.sub)}" if cell.sub else plain(cell.text)
    return f"[{text}]({'' if cell.link in shown else f'../{PAGE}'}#{cell.link})" if cell.link else text


def of_objective(names: Collection[str]) -> str:
    """Return what the suites found for an objective as Markdown, or "" if no suite uses it.

    Args:
        names: the objective and its aliases.
    """
    of = {each: [row for row in each.rows if terms(row.objective) & set(names)] for each in suites()}
    of = {each: rows for each, rows in of.items() if rows}
    if not of:
        return ""
    tested = [
        (suite, cell)
        for suite, rows in of.items()
        for cell in suite.cells
        if cell.against_base is not None and cell.row in rows and _adds(cell.row, suite, names)
    ]
    decided: dict[str, list[str]] = {}  # several suites can share runs
    for suite, cell in tested:
        if cell.p_holm < LEVEL:
            other = ", another protocol than the paper's" if suite.manifest.protocol else ""
            decided.setdefault(_difference(cell), []).append(f"`{suite.manifest.suite}`{other}")
    lines = [
        f"{counted(len(of), 'committed suite')} at small scale use it. [Results](../results/index.md) compares them "
        "with the papers' numbers. The tables show mean and standard deviation over seeds."
    ]
    if tested:
        found = [f"- {text}; {', '.join(where)}" for text, where in decided.items()]
        lines.append(
            f"We tested {counted(len(tested), 'difference')} from a baseline without it, corrected by Holm within each "
            f"suite. {'Significant:' if found else 'None is significant.'}"
        )
        lines += ["\n".join(found)] if found else []
    return "\n\n".join([*lines, *(_folded(suite, rows) for suite, rows in of.items())])


def _adds(row: RowEntry, suite: SuiteResults, names: Collection[str]) -> bool:
    base = next((each for each in suite.rows if each.label == row.base), None)
    return base is not None and not terms(base.objective) & set(names)


def _difference(cell: CellResult) -> str:
    test = cell.against_base
    assert test is not None
    unit = {"%": " points", "": ""}.get(cell.column.unit, f" {cell.column.unit}")
    return (
        f"`{cell.row.label}` against `{cell.row.base}`, {cell.column.name}: {test.difference:+.3g}{unit} "
        f"({test.low:.3g} to {test.high:.3g}, p = {cell.p_holm:.3g}, {counted(test.n, 'seed')})"
    )


def _folded(suite: SuiteResults, rows: list[RowEntry]) -> str:
    """The suite's table with these rows and what they are compared with, to be opened."""
    found = results_table(suite)
    shown = {row.label for row in rows} | {row.base for row in rows}
    kept = [tuple(replace(cell, sub="") for cell in row) for row in found.rows if row[0].text in shown]
    lines = [line for line in to_markdown(replace(found, note="", rows=kept)).splitlines() if line.startswith("|")]
    if suite.manifest.protocol:  # columns are named as the paper names them
        lines = [f"Ours is another protocol than the paper's. {'; '.join(suite.protocol_notes)}.", "", *lines]
    inside = "\n".join(f"    {line}" if line else "" for line in lines)
    return f'??? note "{suite.manifest.title} (`{suite.manifest.suite}`)"\n\n{inside}'
