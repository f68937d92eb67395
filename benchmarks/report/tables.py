"""The tables of a report, once, for HTML, CSV and Markdown: results, runs, and the claims of the papers."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite, nan
from statistics import fmean

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import JudgedClaim, deciding, in_words, judge_claim, says, why
from dipole.benchmarks.claims.published import PrintedCell
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NO_DATA, NOT_COMPARED, NOT_DECIDABLE, UNDECIDED
from dipole.benchmarks.manifest import Problem
from dipole.benchmarks.report.ranking import Rank, level_of
from dipole.benchmarks.report.table import EMPTY, NOTES, Cell, ReportTable, count_cell, detectable_cell, number_cell
from dipole.benchmarks.results_file import RunFiles
from dipole.benchmarks.statistics import Interval, Summary, iqm_interval, number, probability_of_improvement, summarize
from dipole.benchmarks.suite_results import CellResult, SuiteResults
from dipole.core.record import RunRecord
from dipole.core.utils.progress import duration
from dipole.core.utils.text import counted

NOTHING = Summary(0, nan, nan, nan, nan)
CELL_HEAD = (
    "method", "measurement", "n", "mean", "std", "low", "high",
    "printed", "printed std", "printed n", "difference", "diff. low", "diff. high", "verdict",
    "base", "gain", "gain low", "gain high", "p (t)", "p (Holm)", "p (Wilcoxon)", "effect", "detectable",
)  # fmt: skip
DETECTABLE = "detectable difference"
DIAGNOSTICS = (
    "mean_distance", "margin_occupancy", "min_max_ratio", "rank", "effective_rank", "alignment", "uniformity",
    "conditional_entropy", "conditional_entropy_maximum",
)  # fmt: skip
RUN_HEAD = ("run", "seed", "state", "steps", "wall time", "memory (MB)", "GPU memory (MB)", "device")


def results_table(results: SuiteResults) -> ReportTable:
    """Return the suite as the paper prints it: methods by measurements, with the printed number below ours."""
    best = {column: _best(results, column) for column in results.columns}
    head = ["objective"]
    if any(row.label != row.objective for row in results.rows):
        head = ["method", "objective"]
    rows = []
    for row in results.rows:
        cells = [Cell(row.label), Cell(row.objective)][: len(head)]
        for column in results.columns:
            found = results.cell(row.label, column)
            cells.append(_result(found, row.label in best[column]) if found else EMPTY)
        rows.append(tuple(cells))
    note = NOTES["results"]
    least = [detectable_cell(results.detectable(each.name), each.unit) for each in results.manifest.columns]
    if any(cell.text for cell in least):
        rows.append((Cell(DETECTABLE), *[EMPTY] * (len(head) - 1), *least))
        note += f" {NOTES['detectable']}"
    if results.table is not None:
        note += " The printed number is below ours."
    note += of_parts(results.records.values())
    labels = (*head, *(column.label for column in results.manifest.columns))
    return ReportTable(f"{results.manifest.name}-results", "Results", labels, rows, note, frozenset({"objective"}))


def of_parts(records: Iterable[RunRecord]) -> str:
    """Return the part of the data that results are of, unless it is the test part for all of them."""
    parts = Counter(record.evaluated_on for record in records if record.status == "done")
    if not parts or set(parts) == {"test"}:
        return ""
    of = " and ".join(f"{part} ({counted(count, 'run')})" for part, count in sorted(parts.items()))
    return f" Measured on: {of}."


def cells_table(results: SuiteResults) -> ReportTable:
    """Return every cell with its interval, the test against the base, the printed number and the verdict."""
    rows, note = [_cell_row(results, cell) for cell in results.cells], NOTES["cells"]
    if results.table is not None:
        note += f" {NOTES['printed']}"
    return ReportTable(f"{results.manifest.name}-cells", "Every number", CELL_HEAD, rows, note, is_folded=True)


def _cell_row(results: SuiteResults, cell: CellResult) -> tuple[Cell, ...]:
    s, c, t, printed = cell.summary or NOTHING, cell.comparison, cell.against_base, cell.printed
    trials, verdict, corrected = EMPTY, EMPTY, replace(number_cell(cell.p_holm), sub=cell.why_not_significant)
    if printed is not None:
        trials = count_cell(getattr(results.table, "trials", None))
    if c is not None:
        verdict = Cell(c.verdict, sub=c.basis, mark=mark_of(c.verdict))
    return (
        *(Cell(cell.row.label), Cell(cell.column.name)),
        *(count_cell(s.n), *_fields(s, "mean", "std", "low", "high")),
        *(*_fields(printed, "mean", "std"), trials),
        *(*_fields(c, "difference", "low", "high"), verdict),
        *(Cell(cell.base), *_fields(t, "difference", "low", "high", "p_t")),
        *(corrected, *_fields(t, "p_wilcoxon", "effect"), detectable_cell(cell.detectable, cell.column.unit)),
    )


def beside_table(results: SuiteResults) -> ReportTable:
    """Return ours, theirs, the interval of the difference, and the verdict, for the terminal."""
    rows: list[tuple[Cell, ...]] = []
    for cell in results.cells:
        difference, interval, verdict, seeds = EMPTY, "", "", ""
        if (c := cell.comparison) is not None:
            difference, verdict = number_cell(c.difference), c.verdict
            if isfinite(c.low):
                interval = f"{number(c.low)} to {number(c.high)}"
        if cell.summary:
            seeds = f"n = {cell.summary.n}"
        ours, printed = Cell(_result(cell, False).text, sub=seeds), Cell(_printed(cell.printed) or "-")
        names = Cell(cell.row.label), Cell(cell.column.name)
        rows.append((*names, ours, printed, difference, Cell(interval), Cell(verdict)))
    head = ("method", "measurement", "ours", "printed", "difference", "95 % interval", "verdict")
    for column in results.manifest.columns:
        if isfinite(reach := results.detectable(column.name)):
            rows.append((Cell(DETECTABLE), Cell(column.name), detectable_cell(reach, column.unit), *[EMPTY] * 4))
    return ReportTable(f"{results.manifest.name}-beside", results.manifest.title, head, rows)


def coverage_table(suites: Sequence[SuiteResults]) -> ReportTable | None:
    """Return every printed table with its runs here and how many cells agree, or None without any run."""
    by_table: dict[str, list[SuiteResults]] = {}
    for each in suites:
        if each.table is not None:
            by_table.setdefault(each.table.id, []).append(each)
    if not by_table:
        return None
    rows = []
    for table in published.tables().values():
        printed = sum(cell.mean is not None for row in table.rows for cell in row.cells.values())
        about = Cell(table.id), Cell(f"{table.paper_table} ({table.paper})", sub=table.caption), count_cell(printed)
        if table.id not in by_table:
            rows.append((*about, Cell("no runs here", mark="open"), *[count_cell(0)] * 5))
        for suite in by_table.get(table.id, ()):
            verdicts, name = [cell.comparison.verdict for cell in suite.cells if cell.comparison], suite.manifest.name
            if suite.manifest.not_decidable:
                verdicts, name = [], f"{name} ({NOT_DECIDABLE})"
            counts = [count_cell(verdicts.count(each)) for each in (AGREES, DIFFERS, UNDECIDED, NOT_COMPARED)]
            rows.append((*about, Cell(name), count_cell(len(verdicts)), *counts))
    head = ("table", "paper", "printed numbers", "suite", "compared", "agree", "differ", "undecided", "other protocol")
    return ReportTable("published", "Every printed table", head, rows, "Counts of cells that have runs in this folder.")


def aggregate_table(results: SuiteResults) -> ReportTable | None:
    """Return scores of agents over all tasks: interquartile mean, and the probability to beat the row's base."""
    if results.table is None or results.table.domain != "rl":
        return None
    rows, of = [], results.run_groups
    for row in results.rows:
        ours = {c: v for c in results.columns if (v := results.samples(row.label, c))}
        base = {c: v for c in ours if row.base and (v := results.samples(row.base, c))}
        if ours:
            beats = None
            if base:
                mine, groups = [ours[c] for c in base], [of[c] for c in base]
                beats = probability_of_improvement(mine, list(base.values()), runs=groups)
            middle = iqm_interval(list(ours.values()), runs=[of[c] for c in ours])
            tasks = Cell(f"{len(ours)} of {len(results.columns)}", len(ours))
            rows.append((Cell(row.label), tasks, _interval(middle), Cell(row.base or ""), _interval(beats)))
    note = "All runs of all tasks together, with 95 % intervals. Columns of the same runs count once."
    head = ("method", "tasks", "interquartile mean of the score", "base", "P(improvement)")
    return ReportTable(f"{results.manifest.name}-aggregate", "Over all tasks", head, rows, note)


def diagnostics_table(results: SuiteResults) -> ReportTable:
    """Return the geometry of the test embeddings, by row and group of runs."""
    rows, seen = [], set()
    for row, column in product(results.rows, results.columns):
        records = results.runs_of(row.label, column)
        key = (row.label, *(record.hash for record in records))
        values = [_known(record.diagnostics.get(name) for record in records) for name in DIAGNOSTICS]
        if key not in seen and any(values):
            means = [number_cell(fmean(each or [nan])) for each in values]
            rows.append((Cell(row.label), Cell(column), *means))
        seen.add(key)
    head = ("method", "runs of", *(name.replace("_", " ") for name in DIAGNOSTICS))
    note = "Means over seeds, of at most 2000 test embeddings and of one training batch (the last four)."
    return ReportTable(f"{results.manifest.name}-diagnostics", "Diagnostics", head, rows, note, is_folded=True)


def runs_table(results: SuiteResults) -> ReportTable:
    """Return every run a suite asks for, with its cost and the command that repeats it."""
    rows = []
    for job in results.jobs:
        labels = ", ".join(dict.fromkeys(cell.row for cell in job.cells))
        cells = _run_cells(job.hash, job.cells[0].seed, results.records.get(job.hash))
        rows.append((Cell(labels), *cells, Cell(repeat(job.command, job.processes))))
    head = ("method", *RUN_HEAD, "command")
    code = frozenset({"command", "run"})
    return ReportTable(f"{results.manifest.name}-runs", "Runs and cost", head, rows, NOTES["runs"], code, True)


def repeat(command: Sequence[str], processes: int) -> str:
    """Return the command that repeats a run, through torchrun if it had several processes."""
    if processes == 1:
        return shlex.join(["dipole", *command])
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "-m", "dipole"]
    return shlex.join([*torchrun, *command])


def other_runs_table(records: Sequence[RunRecord], runs: RunFiles) -> ReportTable:
    """Return the runs that no suite asked for. The configuration in each folder repeats its run."""
    rows = []
    for r in records:
        results = ", ".join(f"{k} {number(v)}" for k, v in r.results.items() if v is not None)
        if r.evaluated_on != "test" and results:
            results = f"on the {r.evaluated_on} part: {results}"
        command = repeat(["train", str(runs.place(r.hash) / "config.toml")], r.hardware.world_size)
        names = Cell(r.name), Cell(r.domain), Cell(r.objective)
        rows.append((*names, *_run_cells(r.hash, r.seed, r), Cell(results), Cell(command)))
    head = ("name", "domain", "objective", *RUN_HEAD, "results", "command")
    code = frozenset({"objective", "run", "command"})
    return ReportTable("other-runs", "Runs outside any suite", head, rows, NOTES["runs"], code)


def comparison_table(task: str, by: Mapping[str, Sequence[RunRecord]]) -> ReportTable:
    """Return mean and spread of every result by objective, for runs of one task outside suites."""
    every = [record.results for runs in by.values() for record in runs]
    names = list(dict.fromkeys(name for results in every for name, value in results.items() if value is not None))
    rows = []
    for objective, runs in by.items():
        cells = [Cell(objective), count_cell(len(runs))]
        for name in names:
            values = _known(run.results.get(name) for run in runs)
            found = summarize(values) if values else NOTHING
            cells.append(number_cell(found.mean, f"\N{PLUS-MINUS SIGN} {number(found.std)}" if found.n > 1 else ""))
        rows.append(tuple(cells))
    slug = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")
    note = "Mean and standard deviation over all runs of one objective, also if other settings differ."
    head = ("objective", "runs", *names)
    return ReportTable(f"comparison-{slug}", f"Comparison: {task}", head, rows, note, frozenset({"objective"}))


def ranking_table(name: str, ranks: Sequence[Rank]) -> ReportTable:
    """Return objectives over tasks: rank of means, wins and losses, aggregates."""
    rows = []
    for r in ranks:
        label, rank = Cell(r.label), Cell(f"{r.of_means:.2f}", r.of_means)
        if r.missing:
            label, rank = Cell(r.label, sub=f"not ranked: no numbers in {', '.join(r.missing)}"), EMPTY
        counts = [count_cell(n) for n in (r.tasks, r.better, r.worse)]
        gain = _interval(r.gain, 100.0)
        if r.gain is not None and (r.gain.low > 0 or r.gain.high < 0) and not r.has_gain:
            gain = replace(gain, sub=f"{gain.sub}, not significant by Bonferroni over {counted(r.tests, 'test')}")
        rows.append((label, rank, *counts, _interval(r.improvement), gain))
    head = ("objective", "rank of means", "tasks", "better", "worse", "P(improvement)", "gain (%)")
    return ReportTable(f"{name}-ranking", "Ranking over tasks", head, rows, NOTES["ranking"], frozenset({"objective"}))


def problem_tables(problems: Sequence[Problem]) -> list[ReportTable]:
    """Return the files that are not records, and the results that contradict each other."""
    used = "The first of two results, and of two versions of a suite, is used. Runs on other data are not left out."
    found = [
        ReportTable("problems", "Not readable as records", ("file", "problem"), [], "The report ignores these files."),
        ReportTable("conflicts", "Results that contradict each other", ("file", "conflict"), [], used),
    ]
    rows = [(Cell(str(p.path)), Cell(p.message), bool(p.conflict)) for p in problems]
    filled = [replace(table, rows=[row[:2] for row in rows if row[2] == place]) for place, table in enumerate(found)]
    return [table for table in filled if table.rows]


def _run_cells(name: str, seed: int, record: RunRecord | None) -> tuple[Cell, ...]:
    if record is None:
        return (Cell(name), Cell(str(seed), seed), Cell("missing", mark="open"), *[EMPTY] * 5)
    state, gpu = Cell(record.status, sub=record.error or "", mark="bad"), EMPTY
    if record.status == "done":
        state = Cell("done")
    if record.peak_device_bytes is not None:
        gpu = Cell(f"{record.peak_device_bytes / 2**20:.0f}", record.peak_device_bytes)
    time = Cell(duration(record.wall_seconds), record.wall_seconds)
    memory = Cell(f"{record.peak_memory_bytes / 2**20:.0f}", record.peak_memory_bytes)
    device = Cell(record.hardware.device_name, sub=record.hardware.device)
    return Cell(name), count_cell(seed), state, count_cell(record.steps), time, memory, gpu, device


def _result(cell: CellResult, is_best: bool) -> Cell:
    printed = _printed(cell.printed)
    if printed:
        printed = f"printed {printed}"
    if cell.summary is None and cell.has_failed:
        return Cell("failed", None, printed, "bad")
    if cell.summary is None:
        return Cell("missing", None, printed, "open")
    mean, spread, sub, mark = number(cell.summary.mean), "", f"n = {cell.summary.n}", ""
    if cell.summary.n > 1:
        decimals = len(mean.partition(".")[2])
        spread = f" \N{PLUS-MINUS SIGN} {cell.summary.std:.{decimals}f}"
    if cell.wanted != cell.summary.n:
        sub += f" of {cell.wanted}"
    if printed:
        sub += f", {printed}"
    if cell.comparison is not None and cell.comparison.verdict not in (UNDECIDED, NOT_DECIDABLE):
        sub += f", {cell.comparison.verdict}"
    if is_best:
        mark = "best"
    return Cell(f"{mean}{spread}", cell.summary.mean, sub, mark)


def _printed(cell: PrintedCell | None) -> str:
    if cell is None or cell.mean is None:
        return ""
    return f"{cell.mean:g}" if cell.std is None else f"{cell.mean:g} \N{PLUS-MINUS SIGN} {cell.std:g}"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _fields(found: object, *names: str) -> list[Cell]:
    return [number_cell(getattr(found, name, None)) for name in names]


def _interval(found: Interval | None, factor: float = 1.0) -> Cell:
    if found is None:
        return EMPTY
    shown = found.needs
    if isfinite(found.low) and isfinite(found.high):
        shown = f"{number(factor * found.low)} to {number(factor * found.high)}"
    return number_cell(factor * found.value, shown)


def _best(results: SuiteResults, column: str) -> set[str]:
    cells = [c for row in results.rows if (c := results.cell(row.label, column)) and c.summary]
    if len(cells) < 2:
        return set()
    levels = {c.row.label: c.column.sign * level_of(c.summary.mean) for c in cells if c.summary}
    return {label for label, level in levels.items() if level == max(levels.values())}


def claims_table(suite: str, claims: Sequence[JudgedClaim]) -> ReportTable | None:
    """Return the paper's statements about the table of a suite, on its own numbers and on ours. None without claims."""
    if not claims:
        return None
    rows = []
    for each in claims:
        claim, printed = each.claim, judge_claim(each.claim, published.tables())
        verdict = Cell(each.full_verdict, sub=why(each), mark=mark_of(each.verdict))
        about = Cell(claim.id), Cell(claim.statement, sub=claim.note), Cell(says(printed), sub=_reads(claim))
        estimate = EMPTY
        if (found := deciding(each)) is not None:
            estimate = Cell(in_words(found), number_cell(found.comparison.value).sort)
        tested = estimate, number_cell(each.p), number_cell(each.p_holm)
        rows.append((*about, verdict, *tested, _counts(each), _on_printed(printed), Cell(claim.where)))
    head = (
        "claim", "statement", "kind", "verdict on ours", "estimate", "p", "p (Holm)", "our numbers", "printed numbers",
        "where",
    )  # fmt: skip
    return ReportTable(f"{suite}-claims", "The paper's claims", head, rows, NOTES["claims"])


def every_claim_table(claims: Mapping[str, Sequence[JudgedClaim]]) -> ReportTable:
    """Return all statements of the papers, one by one, on the printed numbers and on the suites here, by their name."""
    ours: dict[str, list[tuple[str, JudgedClaim]]] = {}
    for suite, judged in claims.items():
        for each in judged:
            if each.items:
                ours.setdefault(each.claim.id, []).append((suite, each))
    rows = []
    for claim in published.claims():
        printed, found = judge_claim(claim, published.tables()), ours.get(claim.id, [])
        verdict = Cell("no runs here", sub=claim.not_tested, mark="open")
        if not claim.tests:
            verdict = replace(verdict, text="no test in numbers")
        if found:
            verdict = Cell(", ".join(f"{name}: {each.full_verdict}" for name, each in found))
        if len(found) == 1:
            verdict = replace(verdict, mark=mark_of(found[0][1].verdict))
        about = Cell(claim.id), Cell(claim.statement, sub=claim.note), Cell(claim.where, sub=claim.paper)
        kind = Cell(says(printed), sub=_reads(claim))
        rows.append((*about, Cell(claim.basis), kind, _on_printed(printed), verdict))
    head = ("claim", "statement", "where", "basis", "kind", "printed numbers", "verdict on ours")
    return ReportTable("every-claim", "Every claim of the papers", head, rows, NOTES["every_claim"], is_folded=True)


def _reads(claim: published.Claim) -> str:
    return "; ".join(dict.fromkeys(part.reads for part in claim.parts if part.reads))


def _on_printed(outcome: JudgedClaim) -> Cell:
    """Counts, and the verdict where the paper prints a spread and says of how many trials."""
    found = _counts(outcome)
    if not outcome.claim.tests or not outcome.items:
        return found
    if outcome.is_tested:
        return replace(found, sub=f"{outcome.verdict}: {why(outcome)}")
    return replace(found, sub="not tested, because no spread is printed")


def _counts(outcome: JudgedClaim) -> Cell:
    if not outcome.claim.tests:
        return Cell("not testable by numbers")
    count = len(outcome.items)
    if not count:
        return Cell(NO_DATA)
    hold = sum(item.holds for item in outcome.items)
    text = f"{hold} of {count}"
    if outcome.missing:
        text += f", {outcome.missing} without data"
    return Cell(text, hold / count)


def mark_of(verdict: str) -> str:
    return {AGREES: "good", DIFFERS: "bad"}.get(verdict, "open")
