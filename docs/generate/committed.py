"""Tables and the report of the committed results (benchmarks/results/suites)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache

from dipole.benchmarks.manifest import RowEntry
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.chart import Chart, light, to_svg, with_colours
from dipole.benchmarks.report.table import Cell, ReportTable, escaped, to_markdown
from dipole.benchmarks.report.tables import results_table
from dipole.benchmarks.report.write import Report, Section, make_report, to_pages
from dipole.benchmarks.results_file import SHIPPED
from dipole.benchmarks.statistics import LEVEL
from dipole.benchmarks.suite_results import CellResult, Gathered, SuiteResults, gather
from dipole.core.utils.text import counted

PAGE, FOLDER = "report.html", "report"
SHOWN = ("-ranking", "-results", "-claims")
"""Tables of a suite on the page. The others are in the report only."""
COLUMN = re.compile(r"(?<!\\)\|")
TERM = re.compile(r"(?:^|[+*])\s*([A-Za-z_][\w-]*)")


MOST = 6
"""Columns of a table on a page. Wider tables become several, each with the first column."""
DRAWN = 2
"""Pictures of a suite on its page."""


def ranking(suite: str) -> str:
    """Return ranking and results of one study as Markdown.

    Raises:
        StopIteration: there are no results of this study.
    """
    section = next(each for each in report().sections if each.id == suite)
    shown = [found for found in section.tables if found.name.endswith(SHOWN[:2])]
    return "\n\n".join(part for found in shown for part in (escaped(found.note), *narrow(found)))


def narrow(table: ReportTable) -> list[str]:
    """Return a table as Markdown tables of at most MOST columns. Each has the first column."""
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("|")]
    return split(lines)


def split(lines: Sequence[str]) -> list[str]:
    """Divide the lines of a Markdown table into tables of at most MOST columns."""
    rows = [COLUMN.split(line)[1:-1] for line in lines]
    others = len(rows[0]) - 1
    size = -(-others // -(-others // (MOST - 1)))
    parts = [[0, *range(start, min(start + size, others + 1))] for start in range(1, others + 1, size)]
    return ["\n".join(f"|{'|'.join(row[i] for i in part)}|" for row in rows) for part in parts]


def terms(objective: str) -> set[str]:
    """Return the names in an objective's text."""
    return {each.replace("-", "_") for each in TERM.findall(objective)}


@cache
def report() -> Report:
    """Return the report of all committed results."""
    return make_report(SHIPPED, gathered())


@cache
def gathered() -> Gathered:
    """Return all committed runs."""
    return gather([SHIPPED])


@cache
def suites() -> list[SuiteResults]:
    """Return all suites sorted by name."""
    return gathered().suites


def report_files() -> dict[str, bytes]:
    """Return the report for the site by file name: an index and a page for each suite."""
    return {name: text.encode() for name, text in to_pages(report(), PAGE.removesuffix(".html")).items()}


def in_short() -> str:
    """Return one sentence: how many comparisons and claims have a verdict."""
    return report().summary


def overview() -> str:
    """Return the verdicts on the papers' claims, one line per suite, and a link to the report as Markdown."""
    found = next(section for section in report().sections if section.id == "overview")
    shown = {section.id for section in pages()}
    parts = [
        report().summary,
        f"[The report](../{PAGE}) has a page for each suite, with every number, chart, run and command.",
    ]
    for each in reversed(found.tables):
        rows = [[_linked(cell, shown) for cell in row] for row in each.rows]
        lines = [f"| {' | '.join(cells)} |" for cells in (each.head, ["---"] * len(each.head), *rows)]
        parts += [f"## {each.title}", each.note, *split(lines)]
    return "\n\n".join(parts)


def suite_files(section: Section) -> Iterator[tuple[str, str | bytes]]:
    """Return names and contents of a suite's page and its pictures."""
    parts = [f"# {section.title}", section.subtitle + ".", " ".join(section.findings)]
    parts.append("\n".join(f"- {note}" for note in section.notes))
    drawn = [picture for kind in section.pictures.values() for picture in kind][:DRAWN]
    for number, picture in enumerate(drawn):
        name = f"{section.id}-{number}.svg"
        yield name, svg(picture.chart)
        parts += [f"![{escaped(picture.chart.title)}]({name})", escaped(picture.caption)]
    for table in section.tables:
        if table.name.endswith(SHOWN):
            parts += [f"## {escaped(table.title)}", escaped(table.note), *narrow(table)]
    parts.append(f"[The report](../../{FOLDER}/{section.id}.html) has every run, chart and command of this suite.")
    yield f"{section.id}.md", "\n\n".join(part for part in parts if part) + "\n"


def svg(chart: Chart) -> bytes:
    """Return a chart as an SVG file on white."""
    return with_colours(to_svg(chart.spec), light()).encode()


def pages() -> list[Section]:
    """Return the sections with findings and a table. Each has a page."""
    return [
        section
        for section in report().sections
        if section.findings and any(found.name.endswith(SHOWN) for found in section.tables)
    ]


def _linked(cell: Cell, shown: Collection[str]) -> str:
    """Return a cell as Markdown, with a link to its suite's page or to the report."""
    text = f"{escaped(cell.text)}<br>{escaped(cell.sub)}" if cell.sub else escaped(cell.text)
    if not cell.link:
        return text
    return f"[{text}](suites/{cell.link}.md)" if cell.link in shown else f"[{text}](../{FOLDER}/{cell.link}.html)"


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
        if cell.against_base is not None
        and cell.row in rows
        and _adds(cell.row, suite, names)
        and not suite.manifest.not_decidable
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
    parts = narrow(replace(found, note="", rows=kept))
    if suite.manifest.protocol:  # columns are named as the paper names them
        parts.insert(0, f"Ours is another protocol than the paper's. {'; '.join(suite.protocol_notes)}.")
    if suite.manifest.not_decidable:
        parts.insert(0, findings.of_mark(suite.manifest.not_decidable))
    inside = "\n".join(f"    {line}" if line else "" for line in "\n\n".join(parts).splitlines())
    return f'??? note "{suite.manifest.title} (`{suite.manifest.suite}`)"\n\n{inside}'
