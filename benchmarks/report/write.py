"""`dipole report`: one self-contained HTML file, and the same tables as Markdown and CSV."""

from pathlib import Path

from dipole.benchmarks.report.document import Report, make_report
from dipole.benchmarks.report.html import to_html
from dipole.benchmarks.report.table import plain, to_csv
from dipole.benchmarks.report.table import to_markdown as table_to_markdown
from dipole.core.ground.errors import ConfigError, RecordError
from dipole.core.ground.files import atomic_write, why


def write_report(runs: Path, output: Path) -> Report:
    """Read a folder of runs and write report.html, report.md, or a folder with both and one CSV file per table.

    Raises:
        ConfigError: the output's name says none of these.
        RecordError: it cannot be written.
    """
    report = make_report(runs)
    if output.is_dir() or output.suffix == "":
        texts = {output / "report.html": to_html(report), output / "report.md": to_markdown(report)}
        texts |= {output / f"{table.name}.csv": to_csv(table) for table in report.tables}
    elif output.suffix == ".html":
        texts = {output: to_html(report)}
    elif output.suffix == ".md":
        texts = {output: to_markdown(report)}
    else:
        raise ConfigError(f"-o {str(output)!r}: give a name ending in .html or .md, or a folder for all formats.")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text)
        except OSError as error:
            raise RecordError(f"cannot write the report {path}: {why(error)}") from error
    return report


def to_markdown(report: Report) -> str:
    """The tables alone, for a repository or an issue."""
    facts = ", ".join(f"{name}: {plain(value)}" for name, value in report.facts.items())
    lines = [f"# {report.title}", "", facts, ""]
    for section in report.sections:
        lines += [f"## {plain(section.title)}", "", plain(section.subtitle), ""]
        lines += [f"- {plain(note)}" for note in section.notes]
        lines += ["", *(table_to_markdown(table) for table in section.tables)]
    return "\n".join(lines)
