"""The contents of a report before any format: sections of tables and pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipole.benchmarks.gather import gather, places_of
from dipole.benchmarks.report import charts, claim_tables, findings, overview, searches, tables
from dipole.benchmarks.report.picture import Picture
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.report.table import ReportTable
from dipole.benchmarks.run_files import RunFiles
from dipole.benchmarks.run_records import Collection
from dipole.benchmarks.sweep.summary import SearchSummary, read_summaries
from dipole.core.record import RunRecord, now
from dipole.core.utils.progress import duration
from dipole.core.utils.text import counted


@dataclass(frozen=True)
class Section:
    """One part of the report: a suite, or all runs outside suites."""

    id: str
    title: str
    subtitle: str
    notes: Sequence[str]
    tables: Sequence[ReportTable]
    pictures: Mapping[str, Sequence[Picture]]
    findings: Sequence[str] = ()
    is_suite: bool = False


@dataclass(frozen=True)
class Report:
    """Everything a report shows, before any format."""

    title: str
    created: str
    facts: Mapping[str, str]
    sections: Sequence[Section]
    machines: str = ""
    summary: str = ""

    @property
    def findings(self) -> list[str]:
        """The first lines: the findings of each suite, or a summary of many suites."""
        found = [f"{s.title}: {' '.join(s.findings)}" for s in self.sections if s.findings and not self.summary]
        return [line for line in (self.summary, *found, self.machines) if line]

    @property
    def is_split(self) -> bool:
        """True if each suite has a page of its own: there are more than FEW."""
        return bool(self.summary)

    @property
    def tables(self) -> list[ReportTable]:
        return [table for section in self.sections for table in section.tables]


def make_report(runs: Path | Sequence[Path]) -> Report:
    """Return the report of one or several folders of runs and results files: suites, other runs and problems."""
    places = places_of(runs)
    gathered = gather(places)
    collection, beside, problems = gathered.collection, gathered.beside, [*gathered.collection.problems]
    problems += gathered.problems
    suites = [SuiteResults(manifest, collection.records) for manifest in gathered.manifests]
    suites.sort(key=overview.by_paper)
    sections, summary = [_suite(suite, beside, suites) for suite in suites], ""
    if len(suites) > overview.FEW:
        summary = overview.in_a_sentence(suites)
        sections.insert(0, Section("overview", "Overview", "One line for each suite", (), overview.tables(suites), {}))
    if (coverage := tables.coverage_table(suites)) is not None:
        found = (coverage, claim_tables.every_claim_table(suites))
        sections.append(Section("published", "The papers", "Printed tables and our runs", (), found, {}))
    asked = {job.hash for suite in suites for job in suite.jobs}
    for place in filter(Path.is_dir, places):
        searched, unreadable = read_summaries(place)
        sections += [_search(each, collection) for each in searched]
        asked |= {trial.run for each in searched for trial in each.trials}
        problems += unreadable
    others = [record for name, record in collection.records.items() if name not in asked]
    if others:
        listed = tables.other_runs_table(others, beside).without_empty_columns()
        groups = _by_task(others)
        compared = [tables.comparison_table(task, records) for task, records in groups.items() if len(records) > 1]
        subtitle = f"{counted(len(others), 'run')} of dipole train"
        drawn, said = charts.other_runs(groups, beside), findings.of_others(groups)
        sections.append(Section("other-runs", "Other runs", subtitle, (), (*compared, listed), drawn, said))
    if problems:
        subtitle = f"{counted(len(problems), 'entry', 'entries')} of the runs folder"
        sections.append(Section("problems", "Problems", subtitle, (), (tables.problems_table(problems),), {}))
    machines = findings.of_machines(collection.done.values())
    return Report("dipole report", now(), _facts(collection, len(problems)), sections, machines, summary)


def _suite(results: SuiteResults, beside: RunFiles, others: Sequence[SuiteResults]) -> Section:
    manifest, pictures = results.manifest, charts.pictures(results, beside)
    shown = [
        tables.results_table(results),
        tables.aggregate_table(results),
        claim_tables.claims_table(results, others),
        tables.cells_table(results),
        tables.diagnostics_table(results),
        tables.runs_table(results),
    ]
    if manifest.kind == "study" and not results.not_decidable:
        ranks = results.ranks()
        shown.insert(0, tables.ranking_table(manifest.name, ranks))
        pictures = {"Ranking": charts.ranking(manifest.title, ranks, results.base or ""), **pictures}
    pictures["Cost"] = charts.cost(results)
    done = sum(record.status == "done" for record in results.records.values())
    subtitle = f"{manifest.suite}, scale {manifest.scale}: {done} of {counted(len(results.jobs), 'run')} finished"
    filled = [table.without_empty_columns() for table in shown if table is not None and table.rows]
    drawn, said = (
        {name: found for name, found in pictures.items() if found},
        [*findings.of_suite(results, others), *overview.of_power(results)],
    )
    return Section(manifest.name, manifest.title, subtitle, list(_notes(results)), filled, drawn, said, True)


def _by_task(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group comparable runs: one domain, and the same part of the same data set or task."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        if record.status == "done":
            task = ", ".join(filter(None, (record.domain, record.data.get("name"))))
            if record.evaluated_on != "test":
                task += f", {record.evaluated_on} part"
            found.setdefault(task, []).append(record)
    return found


def _search(search: SearchSummary, collection: Collection) -> Section:
    shown = searches.search_tables(search, collection.done)
    drawn = {"Slices": searches.slices(search)}
    drawn = {name: found for name, found in drawn.items() if found}
    title = f"Search: {search.name}"
    return Section(f"search-{search.name}", title, searches.spent(search), searches.notes(search), shown, drawn)


def _notes(results: SuiteResults) -> Iterable[str]:
    manifest, table = results.manifest, results.table
    yield from findings.of_learning(results)
    if manifest.note:
        yield manifest.note
    if manifest.protocol and manifest.published:
        yield f"Our protocol is not the paper's. Do not compare levels. {'. '.join(results.protocol_notes)}."
    elif manifest.protocol:
        yield f"At this scale: {'. '.join(f'{key}: {value}' for key, value in manifest.protocol.items())}."
    yield from results.empty_columns
    if table is not None:
        yield f"Published: {table.paper_table} ({table.paper}). {table.caption}"
        yield from table.notes


def _facts(collection: Collection, problems: int) -> dict[str, str]:
    records: Sequence[RunRecord] = list(collection.records.values())
    facts = {
        "runs": str(len(records)),
        "finished": str(len(collection.done)),
        "domains": ", ".join(sorted({r.domain for r in records})) or "none",
        "computing time": duration(sum(r.wall_seconds for r in records)),
    }
    if problems:
        facts["problems"] = str(problems)
    return facts
