"""`dipole report`: HTML files. Their tables as Markdown, CSV and LaTeX, their charts as SVG and PDF."""

import re
from collections.abc import Sequence
from pathlib import Path

from dipole.benchmarks.report.chart import Chart
from dipole.benchmarks.report.claim_tables import to_json
from dipole.benchmarks.report.document import Report, make_report
from dipole.benchmarks.report.drawing import to_files
from dipole.benchmarks.report.html import to_html, to_pages
from dipole.benchmarks.report.table import plain, to_csv, to_latex
from dipole.benchmarks.report.table import to_markdown as table_to_markdown
from dipole.core.utils.errors import ConfigError, RecordError
from dipole.core.utils.files import atomic_write, why


def write_report(runs: Path | Sequence[Path], output: Path, figures: Path | None = None) -> Report:
    """Write the report of folders of runs and results files as .html, as .md, or as a folder with all formats.

    With more than FEW suites the .html is an index, and a folder of the same name beside it has a page for each suite.
    A folder holds each table as .csv and .tex, claims also as .json. Charts are in charts/ or in the folder `figures`,
    each as .svg, .pdf, Vega-Lite spec and a .tex of its numbers. Raise ConfigError if the output is no .html, .md or
    folder, or if there is no run and the output already has a report, RecordError if it cannot be written.
    """
    check_output(output)
    report = make_report(runs)
    texts: dict[Path, str | bytes] = {}
    if output.is_dir() or output.suffix == "":
        texts = {**_html(report, output / "report.html"), output / "report.md": to_markdown(report)}
        for table in report.tables:
            texts |= {output / f"{table.name}.csv": to_csv(table), output / f"{table.name}.tex": to_latex(table)}
            if table.name.endswith(("-claims", "every-claim")):
                texts[output / f"{table.name}.json"] = to_json(table)
        texts |= _figures(report, output / "charts")
    elif output.suffix == ".html":
        texts |= _html(report, output)
    else:
        texts = {output: to_markdown(report)}
    if figures is not None:
        texts |= _figures(report, figures)
    if report.facts["runs"] == "0" and (there := next((path for path in texts if path.is_file()), None)):
        raise ConfigError(
            f"there is no run to report, so {there} was not replaced. Name a folder of runs, or another -o."
        )
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text)
        except OSError as error:
            option = "--figures" if figures is not None and figures in path.parents else "-o"
            raise RecordError(f"cannot write the report {path}: {why(error, option)}") from error
    return report


def _html(report: Report, path: Path) -> dict[Path, str | bytes]:
    """Return a report as one file, or of many suites as an index and a folder of the same name with their pages."""
    if not report.is_split:
        return {path: to_html(report)}
    return {path.parent / name: text for name, text in to_pages(report, path.stem).items()}


def check_output(output: Path) -> None:
    """Raise ConfigError if a report cannot have that name, because it says no format."""
    if not output.is_dir() and (output.suffix not in ("", ".html", ".md") or output.name in (".html", ".md")):
        raise ConfigError(f"-o {str(output)!r}: give a name ending in .html or .md, or a folder for all formats.")


def _figures(report: Report, folder: Path) -> dict[Path, str | bytes]:
    found: dict[Path, str | bytes] = {}
    for name, chart in named_charts(report).items():
        files = {**to_files(chart), ".tex": to_latex(chart.numbers())}
        found |= {folder / f"{name}{kind}": content for kind, content in files.items()}
    return found


def named_charts(report: Report) -> dict[str, Chart]:
    """Return charts by file name: section and title, numbered if several are the same."""
    found: dict[str, Chart] = {}
    for section in report.sections:
        for picture in (one for pictures in section.pictures.values() for one in pictures):
            title = re.sub(r"[^A-Za-z0-9.=]+", "-", picture.chart.title).strip("-.")[:80]
            name, count = f"{section.id}-{title}", 2
            while name in found:
                name, count = f"{section.id}-{title}-{count}", count + 1
            found[name] = picture.chart
    return found


def to_markdown(report: Report) -> str:
    """Return the tables alone, for a repository or an issue."""
    facts = ", ".join(f"{name}: {plain(value)}" for name, value in report.facts.items())
    lines = [f"# {report.title}", "", *(f"- {plain(line)}" for line in report.findings), "", facts, ""]
    for section in report.sections:
        lines += [f"## {plain(section.title)}", "", plain(section.subtitle), ""]
        lines += [f"- {plain(note)}" for note in section.notes]
        lines += ["", *(table_to_markdown(table) for table in section.tables)]
    return "\n".join(lines)
