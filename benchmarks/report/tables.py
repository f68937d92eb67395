"""The tables of a report, once, for HTML, CSV and Markdown alike."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import fmean

from dipole.benchmarks.report import published
from dipole.benchmarks.report.beside import Beside
from dipole.benchmarks.report.claim_tables import claims_table as claims_table
from dipole.benchmarks.report.claim_tables import every_claim_table as every_claim_table
from dipole.benchmarks.report.claim_tables import short_claims_table as short_claims_table
from dipole.benchmarks.report.comparison import AGREES, DIFFERS, NOT_COMPARED, UNDECIDED
from dipole.benchmarks.report.ranking import Rank, level_of
from dipole.benchmarks.report.results import CellResult, SuiteResults
from dipole.benchmarks.report.table import Cell, ReportTable, number
from dipole.benchmarks.run_records import Collection, Problem
from dipole.benchmarks.statistics import Interval, iqm_interval, probability_of_improvement, summarize
from dipole.core.record import RunRecord
from dipole.core.utils.progress import duration
from dipole.core.utils.text import counted


def results_table(results: SuiteResults) -> ReportTable:
    """The suite as the paper prints it: methods by measurements, with the printed number below ours."""
    best = {column: _best(results, column) for column in results.columns}
    has_objective = any(row.label != row.objective for row in results.rows)
    rows = []
    for row in results.rows:
        cells = [Cell(row.label), *([Cell(row.objective)] if has_objective else [])]
        for column in results.columns:
            found = results.cell(row.label, column)
            cells.append(Cell("") if found is None else _result(found, row.label in best[column]))
        rows.append(tuple(cells))
    units = {c.name: f"{c.name} ({c.unit})" if c.unit else c.name for c in results.manifest.columns}
    note = "Mean and standard deviation over seeds, n of the seeds asked for; best mean of a column in bold."
    if results.table is not None:
        note += " Below it the printed number."
    note += of_parts(results.records.values())
    names = ("method", "objective") if has_objective else ("objective",)
    head = (*names, *(units[c] for c in results.columns))
    return ReportTable(f"{results.manifest.name}-results", "Results", head, rows, note, frozenset({"objective"}))


def of_parts(records: Iterable[RunRecord]) -> str:
    """Which part results are of, where it is not the test part of all of them."""
    parts = Counter(record.evaluated_on for record in records if record.status == "done")
    if not parts or set(parts) == {"test"}:
        return ""
    of = " and ".join(f"{part} ({counted(count, 'run')})" for part, count in sorted(parts.items()))
    return f" Measured on the {'part' if len(parts) == 1 else 'parts'} {of}."


def cells_table(results: SuiteResults) -> ReportTable:
    """Every cell with its interval, the test against the base, the printed number and the verdict."""
    head = (
        "method", "measurement", "n", "mean", "std", "low", "high",
        "printed", "printed std", "printed n", "difference", "diff. low", "diff. high", "verdict",
        "base", "gain", "gain low", "gain high", "p (t)", "p (Holm)", "p (Wilcoxon)", "effect", "seeds for 80 %",
    )  # fmt: skip
    rows = [_cell_row(results, cell) for cell in results.cells]
    note = (
        "Intervals are 95 %. Gain, paired t-test and Wilcoxon: against the base row on common seeds; Holm over all "
        "tests of the suite; effect is Cohen's d of the pairs; the last column: seeds a side that would show a gain of "
        "this size among as many tests. A verdict beside a printed number holds among all of them (Holm), its interval "
        "is that of one."
    )
    return ReportTable(f"{results.manifest.name}-cells", "Every number", head, rows, note, is_folded=True)


def beside_table(results: SuiteResults) -> ReportTable:
    """Ours, theirs, the interval of the difference, and whether it can be decided: what the terminal shows."""
    rows = []
    for cell in results.cells:
        c = cell.comparison
        shown = _result(cell, False)
        has_printed = cell.printed is not None and cell.printed.mean is not None
        interval = f"{number(c.low)} to {number(c.high)}" if c is not None and isfinite(c.low) else ""
        rows.append(
            (
                Cell(cell.row.label),
                Cell(cell.column.name),
                Cell(shown.text, sub=f"n = {cell.summary.n}" if cell.summary else ""),
                Cell(_printed(cell) if has_printed else "-"),
                *_numbers(c.difference if c else None),
                Cell(interval),
                Cell(c.verdict if c else ""),
            )
        )
    head = ("method", "measurement", "ours", "printed", "difference", "95 % interval", "verdict")
    return ReportTable(f"{results.manifest.name}-beside", results.manifest.title, head, rows)


def coverage_table(suites: Sequence[SuiteResults]) -> ReportTable | None:
    """Every printed table: whether this folder has runs for it, and how many cells agree; None without any."""
    by_table: dict[str, list[SuiteResults]] = {}
    for each in suites:
        if each.table is not None:
            by_table.setdefault(each.table.id, []).append(each)
    if not by_table:
        return None
    rows = []
    for table in published.tables().values():
        printed = sum(cell.mean is not None for row in table.rows for cell in row.cells.values())
        found: Sequence[SuiteResults | None] = by_table.get(table.id) or [None]
        for suite in found:
            verdicts = [c.comparison.verdict for c in suite.cells if c.comparison] if suite else []
            counts = [verdicts.count(name) for name in (AGREES, DIFFERS, UNDECIDED, NOT_COMPARED)]
            rows.append(
                (
                    Cell(table.id),
                    Cell(f"{table.paper_table} ({table.paper})", sub=table.caption),
                    Cell(str(printed), printed),
                    Cell(suite.manifest.name) if suite else Cell("no runs here", mark="open"),
                    Cell(str(len(verdicts)), len(verdicts)),
                    *(Cell(str(count), count) for count in counts),
                )
            )
    head = ("table", "paper", "printed numbers", "suite", "compared", "agree", "differ", "undecided", "other protocol")
    return ReportTable("published", "Every printed table", head, rows, "Counts of cells that have runs in this folder.")


def aggregate_table(results: SuiteResults) -> ReportTable | None:
    """Scores of agents over all tasks: interquartile mean, and the probability to beat the row's base."""
    if results.table is None or results.table.domain != "rl":
        return None
    rows = []
    for row in results.rows:
        ours = {c: v for c in results.columns if (v := results.samples(row.label, c))}
        base = {c: v for c in ours if row.base and (v := results.samples(row.base, c))}
        if not ours:
            continue
        of = results.run_groups
        beats = None
        if base:
            beats = probability_of_improvement([ours[c] for c in base], list(base.values()), runs=[of[c] for c in base])
        middle = iqm_interval(list(ours.values()), runs=[of[c] for c in ours])
        tasks = Cell(f"{len(ours)} of {len(results.columns)}", len(ours))
        rows.append((Cell(row.label), tasks, _interval(middle), Cell(row.base or ""), _interval(beats)))
    if not rows:
        return None
    note = "All runs of all tasks together, with 95 % intervals; columns of the same runs count once."
    head = ("method", "tasks", "interquartile mean of the score", "base", "P(improvement)")
    return ReportTable(f"{results.manifest.name}-aggregate", "Over all tasks", head, rows, note)


def diagnostics_table(results: SuiteResults) -> ReportTable | None:
    """Geometry of the test embeddings, by row and group of runs."""
    names = ("mean_distance", "margin_occupancy", "min_max_ratio", "rank", "effective_rank", "alignment",
             "uniformity", "conditional_entropy", "conditional_entropy_maximum")  # fmt: skip
    rows, seen = [], set()
    for row in results.rows:
        for column in results.columns:
            records = results.runs_of(row.label, column)
            key = (row.label, tuple(r.hash for r in records))
            if not records or key in seen:
                continue
            seen.add(key)
            values = [[v for r in records if (v := r.diagnostics.get(name)) is not None] for name in names]
            if any(values):
                cells = (Cell(number(fmean(v)), fmean(v)) if v else Cell("") for v in values)
                rows.append((Cell(row.label), Cell(column), *cells))
    if not rows:
        return None
    head = ("method", "runs of", *(name.replace("_", " ") for name in names))
    note = "Means over seeds, of at most 2000 test embeddings and of one training batch (the last four)."
    return ReportTable(f"{results.manifest.name}-diagnostics", "Diagnostics", head, rows, note, is_folded=True)


def runs_table(results: SuiteResults) -> ReportTable:
    """Every run a suite asks for, with its cost and the command that repeats it."""
    rows = []
    for job in results.jobs:
        record = results.records.get(job.hash)
        labels = ", ".join(dict.fromkeys(cell.row for cell in job.cells))
        seed = job.cells[0].seed
        command = repeat(job.command, job.processes)
        rows.append((Cell(labels), *_run_cells(job.hash, seed, record), Cell(command)))
    head = ("method", *RUN_HEAD, "command")
    return ReportTable(
        f"{results.manifest.name}-runs", "Runs and cost", head, rows, RUN_NOTE, frozenset({"command", "run"}), True
    )


def repeat(command: Sequence[str], processes: int) -> str:
    """What to type to repeat a run: `dipole train`, through torchrun where it had several processes."""
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "-m", "dipole.core.cli"]
    return shlex.join([*(["dipole"] if processes == 1 else torchrun), *command])


def other_runs_table(records: Sequence[RunRecord], runs: Beside) -> ReportTable:
    """Runs that no suite asked for; the configuration that each folder keeps repeats it."""
    rows = []
    for r in records:
        results = ", ".join(f"{k} {number(v)}" for k, v in r.results.items() if v is not None)
        if r.evaluated_on != "test" and results:
            results = f"on the {r.evaluated_on} part: {results}"
        cells = _run_cells(r.hash, r.seed, r)
        command = repeat(["train", _printable(str(runs.place(r.hash) / "config.toml"))], r.hardware.world_size)
        rows.append((Cell(r.name), Cell(r.domain), Cell(r.objective), *cells, Cell(results), Cell(command)))
    head = ("name", "domain", "objective", *RUN_HEAD, "results", "command")
    code = frozenset({"objective", "run", "command"})
    return ReportTable("other-runs", "Runs outside any suite", head, rows, RUN_NOTE, code)


def comparison_table(task: str, records: Sequence[RunRecord]) -> ReportTable:
    """Runs of one task outside suites by objective: mean and spread of every result that two runs have."""
    by: dict[str, list[RunRecord]] = {}
    for record in records:
        by.setdefault(record.objective, []).append(record)
    names = list(
        dict.fromkeys(name for record in records for name, value in record.results.items() if value is not None)
    )
    rows = []
    for objective, runs in by.items():
        cells = [Cell(objective), Cell(str(len(runs)), len(runs))]
        for name in names:
            values = [value for run in runs if (value := run.results.get(name)) is not None]
            summary = summarize(values) if values else None
            spread = f"\N{PLUS-MINUS SIGN} {number(summary.std)}" if summary and summary.n > 1 else ""
            cells.append(Cell(number(summary.mean), summary.mean, spread) if summary else Cell(""))
        rows.append(tuple(cells))
    slug = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")
    note = (
        "Mean and standard deviation over the runs of one objective; what else differs between them is not told apart."
    )
    head = ("objective", "runs", *names)
    return ReportTable(f"comparison-{slug}", f"Comparison: {task}", head, rows, note, frozenset({"objective"}))


RUN_HEAD = ("run", "seed", "state", "steps", "wall time", "memory (MB)", "GPU memory (MB)", "device")
RUN_NOTE = (
    "The command repeats the run. If the run is finished, add --runs FOLDER to repeat it elsewhere or --overwrite to "
    "replace it."
)


def _run_cells(name: str, seed: int, record: RunRecord | None) -> tuple[Cell, ...]:
    if record is None:
        return (Cell(name), Cell(str(seed), seed), Cell("missing", mark="open"), *[Cell("")] * 5)
    state = Cell(record.status, sub=record.error or "", mark="" if record.status == "done" else "bad")
    return (
        Cell(name),
        Cell(str(seed), seed),
        state,
        Cell(str(record.steps), record.steps),
        Cell(duration(record.wall_seconds), record.wall_seconds),
        Cell(f"{record.peak_memory_bytes / 2**20:.0f}", record.peak_memory_bytes),
        Cell("" if record.peak_device_bytes is None else f"{record.peak_device_bytes / 2**20:.0f}",
             record.peak_device_bytes),
        Cell(record.hardware.device_name, sub=record.hardware.device),
    )  # fmt: skip


def ranking_table(name: str, ranks: Sequence[Rank]) -> ReportTable:
    """Objectives over tasks: mean rank, wins and losses, aggregates."""
    rows = []
    for r in ranks:
        rows.append(
            (
                Cell(r.label, sub=f"not ranked: no runs of {', '.join(r.missing)}" if r.missing else ""),
                Cell("" if r.missing else f"{r.mean_rank:.2f}", None if r.missing else r.mean_rank),
                Cell(str(r.tasks), r.tasks),
                Cell(str(r.better), r.better),
                Cell(str(r.worse), r.worse),
                _interval(r.improvement),
                _interval(r.gain, 100.0),
            )
        )
    head = ("objective", "mean rank", "tasks", "better", "worse", "P(improvement)", "gain (%)")
    note = (
        "Rank 1 is best; better and worse count tasks with a significant difference from the base (paired t-test on "
        "common seeds, Holm over all objectives and tasks, 0.05). P(improvement): a run beats a run of the base, mean "
        "over tasks. Gain: in units of the base's mean, mean over the middle tasks. Both with 95 % intervals, in which "
        "columns of the same runs count once. Who lacks runs of a task is not ranked."
    )
    return ReportTable(f"{name}-ranking", "Ranking over tasks", head, rows, note, frozenset({"objective"}))


def problems_table(collection: Collection, more: Iterable[Problem] = ()) -> ReportTable | None:
    """Files in the runs folder that are no records."""
    found = [*collection.problems, *more]
    rows = [(Cell(_printable(str(p.path))), Cell(_printable(p.message))) for p in found]
    if not rows:
        return None
    note = "These were left as they are and count nowhere in this report."
    return ReportTable("problems", "Not readable as records", ("file", "problem"), rows, note)


def _printable(text: str) -> str:
    """A file's name may hold bytes that are no text in any encoding of a report."""
    return text.encode("utf-8", "replace").decode()


def _result(cell: CellResult, is_best: bool) -> Cell:
    if cell.summary is None:
        sub = "" if cell.printed is None or cell.printed.mean is None else f"printed {_printed(cell)}"
        return Cell("failed", None, sub, "bad") if cell.has_failed else Cell("missing", None, sub, "open")
    mean = number(cell.summary.mean)
    decimals = len(mean.partition(".")[2])
    spread = f" \N{PLUS-MINUS SIGN} {cell.summary.std:.{decimals}f}" if cell.summary.n > 1 else ""
    seeds = f"n = {cell.summary.n}" + (f" of {cell.wanted}" if cell.wanted != cell.summary.n else "")
    sub = seeds if cell.printed is None or cell.printed.mean is None else f"{seeds}; printed {_printed(cell)}"
    if cell.comparison is not None and cell.comparison.verdict != UNDECIDED:
        sub += f", {cell.comparison.verdict}"
    return Cell(f"{mean}{spread}", cell.summary.mean, sub, "best" if is_best else "")


def _printed(cell: CellResult) -> str:
    assert cell.printed is not None
    assert cell.printed.mean is not None
    std = "" if cell.printed.std is None else f" \N{PLUS-MINUS SIGN} {cell.printed.std:g}"
    return f"{cell.printed.mean:g}{std}"


def _cell_row(results: SuiteResults, cell: CellResult) -> tuple[Cell, ...]:
    s, c, t = cell.summary, cell.comparison, cell.against_base
    printed, trials = cell.printed, results.table.trials if results.table else None
    return (
        Cell(cell.row.label),
        Cell(cell.column.name),
        Cell(str(s.n) if s else "0", s.n if s else 0),
        *_numbers(*((s.mean, s.std, s.low, s.high) if s else (None,) * 4)),
        *_numbers(*((printed.mean, printed.std) if printed else (None, None))),
        Cell("" if trials is None or printed is None else str(trials), trials),
        *_numbers(*((c.difference, c.low, c.high) if c else (None,) * 3)),
        Cell(c.verdict, sub=c.basis, mark=_mark(c.verdict)) if c else Cell(""),
        Cell(cell.row.base or ""),
        *_numbers(*((t.difference, t.low, t.high, t.p_t) if t else (None,) * 4)),
        *_numbers(cell.p_holm, *((t.p_wilcoxon, t.effect) if t else (None,) * 2)),
        Cell("" if cell.seeds_needed is None else str(cell.seeds_needed), cell.seeds_needed),
    )


def _numbers(*values: float | None) -> list[Cell]:
    return [Cell("") if v is None or not isfinite(v) else Cell(number(v), v) for v in values]


def _interval(found: Interval | None, factor: float = 1.0) -> Cell:
    if found is None:
        return Cell("")
    has_interval = isfinite(found.low) and isfinite(found.high)
    low, high = number(factor * found.low), number(factor * found.high)
    shown = f"{low} to {high}" if has_interval else found.needs
    return Cell(number(factor * found.value), factor * found.value, shown)


def _best(results: SuiteResults, column: str) -> set[str]:
    cells = [c for row in results.rows if (c := results.cell(row.label, column)) and c.summary]
    if len(cells) < 2:
        return set()
    sign = 1 if cells[0].column.higher_is_better else -1
    levels = {c.row.label: sign * level_of(c.summary.mean) for c in cells if c.summary}
    return {label for label, level in levels.items() if level == max(levels.values())}


def _mark(verdict: str) -> str:
    return {AGREES: "good", DIFFERS: "bad"}.get(verdict, "open")
