"""`dipole report`: suites, other runs and problems as one report, in HTML, Markdown, CSV, LaTeX, SVG and PDF."""

import base64
import gc
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dipole.benchmarks.claims.judge import JudgedClaim
from dipole.benchmarks.report import charts, findings, ranking, tables
from dipole.benchmarks.report.chart import CONFIG, Chart, Picture, drawn_at_once, pictured, runtime, to_files, to_svg
from dipole.benchmarks.report.chart_types import scatter_chart
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable, escaped, template, to_csv, to_json, to_latex
from dipole.benchmarks.report.table import to_markdown as table_to_markdown
from dipole.benchmarks.report.tables import DETECTABLE
from dipole.benchmarks.results_file import RunFiles
from dipole.benchmarks.suite_results import Gathered, SuiteResults, gather
from dipole.benchmarks.sweep.study import SearchSummary, TrialLine, read_summaries
from dipole.core.record import RunRecord, now
from dipole.core.utils.errors import ConfigError, RecordError
from dipole.core.utils.extras import needing
from dipole.core.utils.files import atomic_write, disk_refusing
from dipole.core.utils.progress import duration
from dipole.core.utils.text import counted, printable
from dipole.core.utils.version import __version__


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
    def tables(self) -> list[ReportTable]:
        return [table for section in self.sections for table in section.tables]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Suspend the search for unreachable cycles. A report makes none, and millions of objects to search."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def write_report(runs: Path | Sequence[Path], output: Path, figures: Path | None = None) -> Report:
    """Write the report of folders of runs and results files as .html, as .md, or as a folder with all formats.

    Charts are in its folder charts/ or in the folder `figures`. Raise ConfigError if the output is no .html, .md or
    folder, or if there is no run and the output already has a report, RecordError if it cannot be written.
    """
    check_output(output)
    report = make_report(runs)
    texts: dict[Path, str | bytes] = {}
    folders = [] if figures is None else [figures]
    if output.is_dir() or output.suffix == "":
        texts = {output / name: text for name, text in to_pages(report, "report").items()}
        texts[output / "report.md"] = to_markdown(report)
        for table in report.tables:
            texts |= {output / f"{table.name}.csv": to_csv(table), output / f"{table.name}.tex": to_latex(table)}
            if table.name.endswith(("-claims", "every-claim")):
                texts[output / f"{table.name}.json"] = to_json(table)
        folders.append(output / "charts")
    elif output.suffix == ".html":
        texts = {output.parent / name: text for name, text in to_pages(report, output.stem).items()}
    else:
        texts = {output: to_markdown(report)}
    for name, chart in named_charts(report).items() if folders else ():
        files = {**to_files(chart), ".tex": to_latex(chart.numbers())}
        texts |= {folder / f"{name}{kind}": content for folder in folders for kind, content in files.items()}
    if report.facts["runs"] == "0" and (there := next((path for path in texts if path.is_file()), None)):
        unread = [row[1].text for table in report.tables if table.name == "problems" for row in table.rows]
        said = ": ".join([f"there is no run to report, so {there} was not replaced", *unread[:1]]).rstrip(".")
        raise ConfigError(f"{said}. Name a folder of runs, or another -o.")
    for path, text in texts.items():
        option = "--figures" if figures is not None and figures in path.parents else "-o"
        with disk_refusing(f"cannot write the report {path}", RecordError, option):
            atomic_write(path, text)
    return report


def make_report(runs: Path | Sequence[Path], gathered: Gathered | None = None) -> Report:
    """Return the report of folders of runs and results files. `gathered` is what `gather` found there before."""
    places = [runs] if isinstance(runs, Path) else list(runs)
    gathered = gathered or gather(places)
    files, problems = gathered.files, [*gathered.problems]
    suites = sorted(gathered.suites, key=findings.by_paper)
    claims = {suite.manifest.name: suite.claims(suites) for suite in suites}
    sections, summary = [_suite(suite, files, claims[suite.manifest.name]) for suite in suites], ""
    if len(suites) > findings.FEW:
        summary = findings.in_a_sentence(suites, claims)
        both = findings.suites_table(suites, claims), findings.decided_table(suites, claims)
        filled = [table for table in both if table.rows]
        sections.insert(0, Section("overview", "Overview", "One line for each suite", (), filled, {}))
    if (coverage := tables.coverage_table(suites)) is not None:
        found = (coverage, tables.every_claim_table(claims))
        sections.append(Section("published", "The papers", "Printed tables and our runs", (), found, {}))
    asked = {job.hash for suite in suites for job in suite.jobs}
    for place in {place.resolve(): place for place in places if place.is_dir()}.values():
        searched, unreadable = read_summaries(place)
        sections += [_search(each, gathered.done) for each in searched]
        asked |= {trial.run for each in searched for trial in each.trials}
        problems += unreadable
    others = [record for name, record in gathered.records.items() if name not in asked]
    if others:
        listed = tables.other_runs_table(others, files).without_empty_columns()
        groups = _by_task(others)
        several = {task: by for task, by in groups.items() if sum(map(len, by.values())) > 1}
        compared = [tables.comparison_table(task, by) for task, by in several.items()]
        subtitle = f"{counted(len(others), 'run')} of dipole train"
        drawn, said = charts.other_runs(groups, files), findings.of_others(groups)
        sections.append(Section("other-runs", "Other runs", subtitle, (), (*compared, listed), drawn, said))
    if problems:
        subtitle = counted(len(problems), "entry", "entries")
        sections.append(Section("problems", "Problems", subtitle, (), tables.problem_tables(problems), {}))
    machines, records = findings.of_machines(gathered.done.values()), list(gathered.records.values())
    facts = {
        "runs": str(len(records)),
        "finished": str(len(gathered.done)),
        "domains": ", ".join(sorted({r.domain for r in records})) or "none",
        "computing time": duration(sum(r.wall_seconds for r in records)),
    }
    if problems:
        facts["problems"] = str(len(problems))
    return Report("dipole report", now(), facts, sections, machines, summary)


def _suite(results: SuiteResults, files: RunFiles, claims: Sequence[JudgedClaim]) -> Section:
    manifest, pictures = results.manifest, charts.pictures(results, files)
    shown = [
        tables.results_table(results),
        tables.aggregate_table(results),
        tables.claims_table(manifest.name, claims),
        tables.cells_table(results),
        tables.diagnostics_table(results),
        tables.runs_table(results),
    ]
    if manifest.kind == "study" and not results.manifest.not_decidable:
        ranks = ranking.ranks(results)
        shown.insert(0, tables.ranking_table(manifest.name, ranks))
        pictures = {"Ranking": charts.ranking(manifest.title, ranks, results.base or ""), **pictures}
    pictures["Cost"] = charts.cost(results)
    done = sum(record.status == "done" for record in results.records.values())
    subtitle = f"{manifest.suite}, scale {manifest.scale}: {done} of {counted(len(results.jobs), 'run')} finished"
    filled = [table.without_empty_columns() for table in shown if table is not None and table.rows]
    drawn, said = (
        {name: found for name, found in pictures.items() if found},
        [*findings.of_suite(results, claims), *findings.of_power(findings.planned(results))],
    )
    return Section(manifest.name, manifest.title, subtitle, list(_notes(results)), filled, drawn, said, True)


def _by_task(records: Iterable[RunRecord]) -> dict[str, dict[str, list[RunRecord]]]:
    """Group comparable runs, of one domain and the same part of the same data set or task, then by objective."""
    found: dict[str, dict[str, list[RunRecord]]] = {}
    for record in records:
        if record.status == "done":
            task = ", ".join(filter(None, (record.domain, record.data.get("name"))))
            if record.evaluated_on != "test":
                task += f", {record.evaluated_on} part"
            found.setdefault(task, {}).setdefault(record.objective, []).append(record)
    return found


def _notes(results: SuiteResults) -> Iterable[str]:
    manifest, table = results.manifest, results.table
    yield from findings.of_learning(results)
    if manifest.note:
        yield manifest.note
    if manifest.protocol and manifest.published:
        yield f"Our protocol is not the paper's. Do not compare levels. {'. '.join(results.protocol_notes)}."
    elif manifest.protocol:
        yield f"At this scale: {'. '.join(f'{key}: {value}' for key, value in manifest.protocol.items())}."
    yield from findings.empty_columns(results)
    if table is not None:
        yield f"Published: {table.paper_table} ({table.paper}). {table.caption}"
        yield from table.issues


def check_output(output: Path) -> None:
    """Raise ConfigError if a report cannot have that name, because it says no format."""
    if not output.is_dir() and (output.suffix not in ("", ".html", ".md") or output.name in (".html", ".md")):
        raise ConfigError(f"-o {str(output)!r}: give a name ending in .html or .md, or a folder for all formats.")


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
    facts = ", ".join(f"{name}: {escaped(value)}" for name, value in report.facts.items())
    lines = [f"# {report.title}", "", *(f"- {escaped(line)}" for line in report.findings), "", facts, ""]
    for section in report.sections:
        lines += [f"## {escaped(section.title)}", "", escaped(section.subtitle), ""]
        lines += [f"- {escaped(note)}" for note in section.notes]
        lines += ["", *(table_to_markdown(table) for table in section.tables)]
    return "\n".join(lines)


RUNTIME = "vega.js"  # Vega in the folder of a report of several pages, once for all of them


def to_pages(report: Report, name: str) -> dict[str, str]:
    """Return a report as HTML by path: NAME.html, and of many suites NAME/SUITE.html for each.

    No page needs another file but Vega. The first pictures of a kind are SVG and need no script. Vega draws their specs
    when the pointer is over them, and draws the other pictures when they are unfolded.
    """
    if not report.summary:
        return {f"{name}.html": _page(report, report.sections, "#{}".format)}
    suites = [section for section in report.sections if section.is_suite]
    others = [section for section in report.sections if not section.is_suite]
    found = {f"{name}.html": _page(report, others, f"{name}/{{}}.html".format)}
    if any(section.pictures for section in suites):
        found[f"{name}/{RUNTIME}"] = runtime()
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
    style, script = template("report.css"), template("report.js")
    if has_charts:
        config = f"const CHART_CONFIG = {json.dumps(CONFIG)};"
        script = "\n".join(([] if index else [runtime()]) + [config, script, template("charts.js")])
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
        drawn = f'<div class="drawn">{to_svg(spec).replace("<svg ", f"<svg {label} ", 1)}</div>'
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


def _search(search: SearchSummary, records: Mapping[str, RunRecord]) -> Section:
    """Return the section of a search (`dipole sweep`): trials spent, the winner on both parts, and what mattered."""
    states = Counter(trial.state for trial in search.trials)
    ended = ", ".join(f"{count} {state}" for state, count in states.items()) or "none begun"
    spent = f"{search.recipe}: {counted(len(search.trials), 'trial')} ({ended}), compared by {search.metric}"
    notes = (
        "Trials are measured on a validation part of the training data. The winner's value there is the best of many "
        "and so too optimistic. The result is its seeds on the test part, which no trial has seen.",
        f"Space: {', '.join(search.space)}.",
    )
    shown = [_winner(search, records)]
    if search.importance:
        rows = [(Cell(key), Cell(f"{100 * share:.0f}", share)) for key, share in search.importance.items()]
        note = "How much each key separates the best trials from the others (PED-ANOVA)."
        head = ("key", "share (%)")
        shown.append(ReportTable(f"{search.name}-importance", "What mattered", head, rows, note, frozenset({"key"})))
    shown.append(_trials(search))
    pictures = {"Slices": drawn} if (drawn := _slices(search)) else {}
    return Section(f"search-{search.name}", f"Search: {search.name}", spent, notes, shown, pictures)


def _winner(search: SearchSummary, records: Mapping[str, RunRecord]) -> ReportTable:
    best = next((trial for trial in search.trials if trial.number == search.best), None)
    seeds = [records[run].results.get(search.metric) for run in search.winner if run in records]
    tested = [value for value in seeds if value is not None]
    rows = []
    if best is not None:
        value = Cell(_number(best.value), best.value)
        rows.append((Cell("validation"), value, Cell(f"trial {best.number}"), _values(best)))
    if tested:
        spread, many = "", "one seed"
        if len(tested) > 1:
            spread, many = f"+- {stdev(tested):.3g}", f"{len(tested)} seeds"
        rows.append((Cell("test"), Cell(_number(fmean(tested)), fmean(tested), spread), Cell(many), EMPTY))
    return ReportTable(f"{search.name}-winner", "The winner", ("part", search.metric, "of", "values"), rows)


def _trials(search: SearchSummary) -> ReportTable:
    sign = -1 if search.maximize else 1
    ordered = sorted(search.trials, key=lambda each: (each.value is None, sign * (each.value or 0.0), each.number))
    rows = [
        (
            Cell(str(trial.number), trial.number),
            Cell(trial.state),
            Cell(_number(trial.value), trial.value, mark="best" if trial.number == search.best else ""),
            _values(trial),
            Cell(trial.run),
        )
        for trial in ordered
    ]
    head = ("trial", "state", search.metric, "values", "run")
    return ReportTable(f"{search.name}-trials", "Trials", head, rows, "", frozenset({"run"}), is_folded=True)


def _values(trial: TrialLine) -> Cell:
    return Cell(", ".join(f"{key}={_number(value)}" for key, value in trial.values.items()))


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _slices(search: SearchSummary) -> list[Picture]:
    """Draw the metric over each numeric key, and over the trials in order."""
    done = [trial for trial in search.trials if trial.value is not None]
    places = [(f"{search.metric} by trial", "trial", {trial.number: float(trial.number) for trial in done})]
    for text in reversed(search.space):
        key, _, how = text.partition("=")
        label = key
        if how.startswith("log"):
            label += " (searched in its logarithm)"
        values = {trial.number: trial.values.get(key) for trial in done}
        numbers = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        places.insert(0, (f"{search.metric} over {key}", label, numbers))
    found = []
    for title, label, at in places:
        points = [(at[trial.number], float(trial.value or 0.0)) for trial in done if trial.number in at]
        if len({x for x, _ in points}) > 1:
            chart = scatter_chart(title, label, search.metric, {"trials": points}, is_equal=False)
            found += pictured(chart, f"{title}, on the validation part.")
    return found
