"""`dipole report`: one self-contained HTML file, and the same tables as Markdown and CSV."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dipole import __version__
from dipole.benchmarks import charts, sheets
from dipole.benchmarks.charts import Picture
from dipole.benchmarks.collect import Collection, collect
from dipole.benchmarks.manifest import read_manifests
from dipole.benchmarks.results import SuiteResults
from dipole.benchmarks.sheets import Sheet
from dipole.core.ground.errors import ConfigError, RecordError
from dipole.core.ground.files import atomic_write, why
from dipole.core.ground.progress import duration
from dipole.core.record import RunRecord, now


@dataclass(frozen=True)
class Section:
    """One part of the report: a suite, or all runs outside suites."""

    id: str
    title: str
    subtitle: str
    notes: Sequence[str]
    sheets: Sequence[Sheet]
    pictures: Mapping[str, Sequence[Picture]]


@dataclass(frozen=True)
class Report:
    """Everything a report shows, before any format."""

    title: str
    created: str
    facts: Mapping[str, str]
    sections: Sequence[Section]

    @property
    def sheets(self) -> list[Sheet]:
        return [sheet for section in self.sections for sheet in section.sheets]


def write_report(runs: Path, output: Path) -> Report:
    """Read a folder of runs and write report.html, report.md, or a folder with both and one CSV file per table.

    Raises:
        ConfigError: the output's name says none of these.
        RecordError: it cannot be written.
    """
    report = make_report(runs)
    if output.is_dir() or output.suffix == "":
        texts = {output / "report.html": to_html(report), output / "report.md": to_markdown(report)}
        texts |= {output / f"{sheet.name}.csv": sheets.to_csv(sheet) for sheet in report.sheets}
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


def make_report(runs: Path) -> Report:
    """Collect records, fill the suites, and lay out the sections: ranking first, suites, other runs, problems."""
    collection = collect(runs)
    manifests, damaged = read_manifests(runs)
    suites = [SuiteResults(manifest, collection.records) for manifest in manifests]
    suites.sort(key=lambda s: (s.manifest.kind != "study", s.manifest.name))
    joules = sheets.joules_of(collection)
    sections = [_suite(suite, runs, joules, suites) for suite in suites]
    if (coverage := sheets.coverage_sheet(suites)) is not None:
        found = (coverage, sheets.every_claim_sheet(suites))
        sections.append(Section("published", "The papers", "What was printed, and what was run here", (), found, {}))
    asked = {job.hash for suite in suites for job in suite.jobs}
    others = [record for name, record in collection.records.items() if name not in asked]
    if others:
        sheet = sheets.other_runs_sheet(others, joules, runs).without_empty_columns()
        subtitle = f"{len(others)} runs of `dipole train`" if len(others) != 1 else "one run of `dipole train`"
        sections.append(Section("other-runs", "Other runs", subtitle, (), (sheet,), {}))
    if (problems := sheets.problems_sheet(collection, damaged)) is not None:
        count = len(problems.rows)
        subtitle = f"{count} {'entry' if count == 1 else 'entries'} of the runs folder"
        sections.append(Section("problems", "Problems", subtitle, (), (problems,), {}))
    return Report("dipole report", now(), _facts(collection, joules), sections)


def to_html(report: Report) -> str:
    """One file without any reference to another: styles, script and pictures are inside."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise ConfigError("the HTML report needs Jinja. Install it with: pip install 'dipole[report]'") from error
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


def to_markdown(report: Report) -> str:
    """The tables alone, for a repository or an issue."""
    plain = sheets.plain
    facts = ", ".join(f"{name}: {plain(value)}" for name, value in report.facts.items())
    lines = [f"# {report.title}", "", facts, ""]
    for section in report.sections:
        lines += [f"## {plain(section.title)}", "", plain(section.subtitle), ""]
        lines += [f"- {plain(note)}" for note in section.notes]
        lines += ["", *(sheets.to_markdown(sheet) for sheet in section.sheets)]
    return "\n".join(lines)


def _suite(
    results: SuiteResults, runs: Path, joules: Mapping[str, Mapping[str, float]], others: Sequence[SuiteResults]
) -> Section:
    manifest = results.manifest
    tables = [sheets.results_sheet(results)]
    pictures = dict(charts.pictures(results, runs))
    if manifest.kind == "study":
        ranks = results.ranks()
        tables.insert(0, sheets.ranking_sheet(manifest.name, ranks))
        pictures = {"Ranking": charts.ranking(manifest.title, ranks, results.base or ""), **pictures}
    optional = (
        sheets.aggregate_sheet(results),
        sheets.claims_sheet(results, others),
        sheets.cells_sheet(results),
        sheets.diagnostics_sheet(results),
    )
    tables += [sheet for sheet in optional if sheet is not None]
    tables.append(sheets.runs_sheet(results, joules))
    pictures["Cost"] = charts.cost(results)
    done = sum(record.status == "done" for record in results.records.values())
    subtitle = f"{manifest.suite}, scale {manifest.scale}: {done} of {len(results.jobs)} runs finished"
    shown = {name: found for name, found in pictures.items() if found}
    tables = [sheet.without_empty_columns() for sheet in tables]
    return Section(manifest.name, manifest.title, subtitle, list(_notes(results)), tables, shown)


def _notes(results: SuiteResults) -> Iterable[str]:
    manifest, table = results.manifest, results.table
    if manifest.note:
        yield manifest.note
    if manifest.protocol:
        what = "the paper's" if table else "the papers'"
        yield f"Our protocol is not {what}; levels are not to be compared. " + "; ".join(results.protocol_notes) + "."
    yield from results.empty_columns
    if table is not None:
        yield f"Published: {table.paper_table} ({table.paper}). {table.caption}"
        yield from table.notes


def _facts(collection: Collection, joules: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    records: Sequence[RunRecord] = list(collection.records.values())
    facts = {
        "runs": str(len(records)),
        "finished": str(len(collection.done)),
        "domains": ", ".join(sorted({r.domain for r in records})) or "none",
        "computing time": duration(sum(r.wall_seconds for r in records)),
    }
    if joules:
        facts["energy"] = f"{sum(sum(j.values()) for j in joules.values()) / 3.6e6:.2f} kWh"
    if collection.problems:
        facts["problems"] = str(len(collection.problems))
    return facts


def _template(name: str) -> str:
    return files("dipole.benchmarks").joinpath("templates", name).read_text(encoding="utf-8")
