"""`dipole bench`: expand a suite, run what is missing, show plan, progress with the time left, results and failures."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf, nan
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from rich.progress import ProgressColumn
from rich.progress import Task as ProgressTask
from rich.text import Text

from dipole.benchmarks.manifest import read_manifests, write_manifest
from dipole.benchmarks.plan import Estimator, Plan, Time, faults, make_plan, missing_data, unknown_metrics
from dipole.benchmarks.report import findings, table, tables
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.table import ReportTable
from dipole.benchmarks.results_file import SHIPPED_NAME, known_runs, merged_manifests, shipped_runs, stored_overrides
from dipole.benchmarks.run import reference
from dipole.benchmarks.run.engine import Engine, EngineTask, LocalEngine, PoolEngine, TaskResult
from dipole.benchmarks.run.reference import basis
from dipole.benchmarks.suite import Job, ScaleName, Sized, read_suite, suites
from dipole.benchmarks.suite_results import SuiteResults, gather
from dipole.core.cli.output import write
from dipole.core.record import RunRecord, read_record
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.files import disk_refusing
from dipole.core.utils.progress import Progress, console, duration
from dipole.core.utils.text import are, counted, text_table

EngineName = Literal["local", "ray", "slurm"]


@dataclass(frozen=True)
class SuiteSummary:
    done: int
    failed: tuple[TaskResult, ...]
    skipped: int

    def as_dict(self) -> dict[str, Any]:
        return {"done": self.done, "skipped": self.skipped, "failed": [each.as_dict() for each in self.failed]}


def bench(
    name: str,
    scale: ScaleName | None = None,
    runs: Path = Path("runs"),
    engine: EngineName = "local",
    jobs: int | None = None,
    threads: int | None = None,
    plan_only: bool = False,
    effect: float | None = None,
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    slurm: Mapping[str, str] | None = None,
    answer: dict[str, Any] | None = None,
    known: Sequence[Path] = (),
    mentions_shipped: bool = True,
) -> int:
    """Run what is missing of a suite and return the exit code: 1 if a job failed or, with `plan_only`, cannot be built.

    The arguments are the options of `dipole bench` (`commands.py`). `answer` is filled with what `--json` prints.
    """
    answer = {} if answer is None else answer
    suite = read_suite(name)
    if scale is None and "small" in suite.scale:
        scale = "small"
    scale = scale or "paper"
    sized = suite.at(scale, overrides, seeds)
    wanted = sized.jobs()
    records = known_runs(known) | finished(runs)
    left = [job for job in wanted if job.hash not in records]
    answer |= {"suite": name, "scale": scale}
    if name not in suites():
        metrics = dict.fromkeys(column.metric_of(row) for row, column, _ in sized.cells())
        for line in unknown_metrics(metrics, records.values()):
            write(f"{line} If the runs lack it too, its column stays empty.", sys.stderr)
    if plan_only:
        # A plan for a cluster needs no cluster.
        slots = jobs or 1
        if engine == "local":
            slots = make_engine(engine, jobs, threads, slurm=slurm).slots
        plan = make_plan(sized, wanted, records, slots, effect)
        print_plan(sized, plan)
        found = (*faults(wanted, sized.scale.processes), *missing_data(left))
        about = [(cell, {"run": job.hash, "command": job.command}) for job in wanted for cell in job.cells]
        cells = [cell.model_dump() | run for cell, run in about]
        answer |= {name: value for name, value in asdict(plan).items() if name != "cells"}
        answer |= {"faults": [str(fault) for fault in found], "cells": cells}
        for fault in found:
            write(f"cannot run: {fault}")
        return int(bool(found))
    chosen = make_engine(engine, jobs, threads, sized.scale.shared_process, slurm)
    if mentions_shipped and not known and (count := len(shipped_runs(sized) & {job.hash for job in left})):
        write(f"dipole ships the results of {count} of {len(wanted)} runs: --known {SHIPPED_NAME}.", sys.stderr)
    if not overrides and (kept := stored_overrides(known).get((sized.suite.name, scale))):
        settings = " ".join(f"--set {quote(each)}" for each in kept)
        write(f"The known results were made with {settings}. Add this, or all runs are repeated.", sys.stderr)
    faulty = missing_data(left)
    failing = {cell for fault in faulty for cell in fault.cells}
    if faulty and all(failing.issuperset(job.cells) for job in left):
        raise DataError("\n".join(map(str, faulty)))
    for fault in faulty:
        write(f"will fail: {fault}", sys.stderr)
    summary = run_suite(sized, wanted, records, runs, chosen)
    print_results(SuiteResults(sized.manifest(wanted), gather([runs, *known]).records))
    print_summary(sized, summary, runs)
    answer |= {"runs": str(runs), **summary.as_dict()}
    return int(bool(summary.failed))


def run_suite(
    sized: Sized, wanted: Sequence[Job], records: dict[str, RunRecord], runs: Path, engine: Engine
) -> SuiteSummary:
    """Describe a suite in the runs folder and run what is missing of it. Runs finished before, of other seeds, stay."""
    make_runs_folder(runs)
    manifest = sized.manifest(wanted)
    for earlier in read_manifests(runs)[0]:
        if earlier.name == manifest.name:
            done = earlier.model_copy(update={"jobs": [job for job in earlier.jobs if job.hash in records]})
            manifest, _ = merged_manifests(manifest, done)
    write_manifest(runs, manifest)
    return run_jobs(wanted, records, runs, engine, sized.scale.processes)


def make_runs_folder(folder: Path) -> None:
    """Create a runs folder, or a folder inside one. TrainingError if that is not possible."""
    with disk_refusing(f"cannot write the runs folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def finished(runs: Path) -> dict[str, RunRecord]:
    """Return the finished runs of a folder, those of its results files included, none if there is no folder yet."""
    if not runs.is_dir():
        return {}
    return gather([runs]).done


def _plan_shipped(
    scale: ScaleName, records: Mapping[str, RunRecord], known: Sequence[Path], estimator: Estimator, slots: int
) -> list[tuple[Sized, list[Job], Time]]:
    """Return each shipped suite with its jobs and the time of the missing ones, set as its known results."""
    changed, found = stored_overrides(known), []
    for name in suites():
        suite = read_suite(name)
        if scale in suite.scale:
            sized = suite.at(scale, changed.get((name, scale), ()))
            wanted = sized.jobs()
            missing = [job.config for job in wanted if job.hash not in records]
            time = estimator.total(missing, slots, shares_processes=sized.scale.processes == 1)
            found.append((sized, wanted, time))
    return found


def plan_all(
    scale: ScaleName,
    runs: Path,
    jobs: int | None,
    threads: int | None,
    answer: dict[str, Any] | None = None,
    known: Sequence[Path] = (),
) -> int:
    """Print runs and time of each shipped suite, then what cannot be built, which makes the exit code 1."""
    records = known_runs(known) | finished(runs)
    estimator, slots = Estimator(records.values()), LocalEngine(jobs, threads).slots
    planned = _plan_shipped(scale, records, known, estimator, slots)
    rows = [("suite", "runs", "finished", "estimated time")]
    problems, absent, notes, lines = [], [], [], []
    for sized, wanted, takes in planned:
        name, hashes = sized.suite.name, {job.hash for job in wanted}
        rows.append((name, str(len(hashes)), str(len(hashes & records.keys())), str(takes)))
        lines.append({"suite": name, "runs": len(hashes), "seconds": takes.seconds, "within": takes.within})
        problems += [f"{name}: {fault}" for fault in faults(wanted, sized.scale.processes)]
        absent += [f"{name}: {fault}" for fault in missing_data([job for job in wanted if job.hash not in records])]
        if sized.overrides:
            notes.append(f"{name}: as its results are kept, with --set {' '.join(sized.overrides)}")
    every = {job.hash: job.config for _, wanted, _ in planned for job in wanted}
    missing = [config for name, config in every.items() if name not in records]
    total = estimator.total(missing, slots, shares_processes=True)
    rows.append(("all (shared runs once)", str(len(every)), str(len(every) - len(missing)), str(total)))
    write(f"Shipped suites at scale {scale}, {counted(slots, 'run')} at a time\n")
    for line in (text_table(rows), "", basis(), *notes, *(f"cannot run: {problem}" for problem in problems + absent)):
        write(line)
    if answer is not None:
        answer |= {"scale": scale, "suites": lines, "seconds": total.seconds, "faults": problems, "missing": absent}
    return int(bool(problems))


def bench_all(
    scale: ScaleName = "small",
    runs: Path = Path("runs"),
    jobs: int | None = None,
    threads: int | None = None,
    within: float = inf,
    known: Sequence[Path] = (),
    answer: dict[str, Any] | None = None,
) -> int:
    """Run what is missing of every shipped suite, the shortest first. The exit code is 1 if a job failed.

    Runs share processes, as starting one takes longer than many runs. A suite that takes longer than `within` hours by
    the plan is left out.
    """
    answer = {} if answer is None else answer
    elsewhere = known_runs(known)
    write(f"Times are reckoned {basis()}", sys.stderr)
    records = elsewhere | finished(runs)
    estimator, slots = Estimator(records.values()), PoolEngine(jobs, threads).slots
    summaries = []
    planned = _plan_shipped(scale, records, known, estimator, slots)
    for sized, wanted, takes in sorted(planned, key=lambda each: each[2].seconds):
        name = f"{sized.suite.name} ({scale})"
        records = elsewhere | finished(runs)
        if takes.seconds > 3600 * within:
            write(f"{name} is left out: {takes}.", sys.stderr)
        elif all(job.hash in records for job in wanted):
            write(f"{name}: nothing to do, {counted(len(wanted), 'run')} finished.", sys.stderr)
        else:
            write(f"{name}: {takes}.", sys.stderr)
            engine = make_engine("local", jobs, threads, shared_process=sized.scale.processes == 1)
            summary = run_suite(sized, wanted, records, runs, engine)
            print_summary(sized, summary, runs)
            summaries.append({"suite": sized.suite.name, **summary.as_dict()})
    answer |= {"scale": scale, "runs": str(runs), "suites": summaries}
    return int(any(each["failed"] for each in summaries))


def make_engine(
    engine: EngineName,
    jobs: int | None,
    threads: int | None,
    shared_process: bool = False,
    slurm: Mapping[str, str] | None = None,
) -> Engine:
    """Return the engine of a name. Raise ConfigError if options of sbatch are given for another engine."""
    if slurm and engine != "slurm":
        raise ConfigError(f"--slurm {' '.join(f'{k}={v}' for k, v in slurm.items())} belongs to --engine slurm.")
    if engine == "slurm":
        from dipole.benchmarks.run.cluster_engines import SlurmEngine

        return SlurmEngine(jobs, threads, slurm)
    if engine == "ray":
        from dipole.benchmarks.run.cluster_engines import RayEngine

        return RayEngine(jobs, threads)
    if shared_process:
        return PoolEngine(jobs, threads)
    return LocalEngine(jobs, threads)


def run_jobs(
    jobs: Sequence[Job], records: dict[str, RunRecord], runs: Path, engine: Engine, processes: int = 1
) -> SuiteSummary:
    """Run the jobs without a finished record. A failed job does not stop the others."""
    waiting = {job.hash: job.config for job in jobs if job.hash not in records}
    tasks = [
        EngineTask(job.hash, f"{job.config.name}, {job.recipe}, seed {job.config.seed}", job.command, processes)
        for job in jobs
        if job.hash in waiting
    ]
    estimator, skipped = Estimator(records.values()), len(jobs) - len(tasks)
    failed: list[TaskResult] = []
    done = 0
    if skipped:
        write(f"{skipped} of {counted(len(jobs), 'run')} {are(skipped)} finished already.", sys.stderr)
    with reporter(len(tasks)) as report:

        def show(line: str) -> None:
            left = estimator.total(list(waiting.values()), engine.slots, engine.shares_processes)
            report(done, len(failed), left.seconds, line)

        if tasks:
            show(f"{counted(len(tasks), 'run')}, {engine.slots} at a time")
        for result in engine.run(tasks, runs):
            waiting.pop(result.task.hash)
            if result.status == "done":
                done += 1
                # The record's time: another runner may have done the work, a resumed run took more than this attempt.
                estimator.add(read_record(runs / result.task.hash / "record.json"))
                show(f"done    {result.task.hash}  {result.task.label}  ({duration(result.seconds)})")
            else:
                failed.append(result)
                show(f"FAILED  {result.task.hash}  {result.task.label}: {result.message}  (log: {result.log})")
    return SuiteSummary(done, tuple(failed), skipped)


def print_plan(sized: Sized, plan: Plan) -> None:
    left = plan.jobs - plan.finished
    write(
        f"{sized.suite.name} ({sized.name}): {counted(plan.cells, 'cell')} from {counted(plan.jobs, 'run')}, "
        f"{plan.finished} finished, {left} to do."
    )
    write(f"Estimated time with {plan.slots} at a time: {plan.time}.")
    if count := plan.time.reckoned:
        write(f"{count} of {counted(left, 'run')} {are(count)} reckoned: {reference.basis()}")
    print_cells(sized)
    write(f"\nSeeds of each row for 80 % power (t-test at 0.05, Holm over {counted(plan.tests, 'test')})\n")
    rows = [("column", "spread from", "difference", "spread", "seeds", "planned", "detectable")]
    for line, column in zip(plan.seeds, sized.columns, strict=True):
        spread, seeds, words = "-", "-", line.words
        if line.difference is not None and not words.startswith(number := f"{line.difference:.3g}"):
            words = f"{number}, {words}"
        if line.std is not None:
            spread, seeds = f"{line.std:.3g}", str(line.seeds or "over 1,000,000")
        least = table.detectable_cell(line.detectable or nan, column.unit).text or "-"
        rows.append((line.column, line.source, words, spread, seeds, str(len(sized.seeds)), least))
    write(text_table(rows, words=(0, 1, 2)))


def print_cells(sized: Sized) -> None:
    recipe = sized.scale.recipe and f"recipe {sized.scale.recipe}"  # without one, columns or rows name theirs
    write(", ".join(filter(None, [recipe, f"seeds {', '.join(map(str, sized.seeds))}"])))
    if sized.not_decidable:
        write(findings.of_mark(sized.not_decidable))
    if sized.scale.set:
        write(f"  every run: {' '.join(sized.scale.set)}")
    for column in sized.columns:
        write("  ".join(filter(None, [f"  column {column.name}: {column.metric}", column.recipe, *column.set])))
    for row in sized.rows:
        write("  ".join(filter(None, [f"  row {row.label}: {row.objective}", row.recipe, *row.set])))


def print_results(results: SuiteResults) -> None:
    """Print our numbers and the printed ones, or the ranking and the results of a study."""
    shown = [tables.results_table(results)]
    if results.table is not None:
        shown = [tables.beside_table(results)]
        if claims := tables.claims_table(results.manifest.name, results.claims()):
            known = [row for row in claims.rows if row[claims.head.index("estimate")].text]
            shown.append(replace(claims, rows=known).only("claim", "kind", "estimate", "p (Holm)", "verdict on ours"))
        if results.protocol_notes:
            write("Our protocol is not the paper's: " + "; ".join(results.protocol_notes) + ".")
    elif results.manifest.kind == "study" and not results.manifest.not_decidable:
        shown.insert(0, tables.ranking_table(results.manifest.name, ranks(results)))
    for found in shown:
        if found.rows:
            print_table(found)
    if results.manifest.not_decidable:
        write(findings.of_mark(results.manifest.not_decidable))
    for line in findings.empty_columns(results):
        write(line)


def print_table(table: ReportTable) -> None:
    """Print a table, as wide as the console. The notes of its cells are lines below them."""
    shown = table.without_empty_columns()
    rows = [shown.head]
    for row in shown.rows:
        rows.append(tuple(cell.text for cell in row))
        if any(cell.sub for cell in row):
            rows.append(tuple(cell.sub for cell in row))
    words = [column for column, is_number in enumerate(shown.numeric) if not is_number]
    write(f"\n{shown.title}\n\n{text_table(rows, words, console().width)}")


def print_summary(sized: Sized, summary: SuiteSummary, runs: Path) -> None:
    write(
        f"{sized.suite.name} ({sized.name}): {counted(summary.done, 'run')} done, {summary.skipped} finished before, "
        f"{len(summary.failed)} failed.",
    )
    for result in summary.failed:
        write(f"  {result.task.hash}  {result.task.label}: {result.message}")
        write(f"    log: {result.log}")
        again = tables.repeat([*result.task.command, "--runs", str(runs)], result.task.processes)
        write(f"    again: {again}")


class _TimeLeft(ProgressColumn):
    """The estimated time left. Runs end side by side, so their pace does not tell it."""

    end = 0.0

    def render(self, task: ProgressTask) -> Text:
        return Text(f"about {duration(self.end - time.monotonic())} left")


@contextmanager
def reporter(total: int) -> Iterator[Callable[[int, int, float, str], None]]:
    """Yield a function that prints a line, above a bar on a terminal, of finished and failed runs and seconds left."""
    progress, left = Progress(), _TimeLeft()
    progress.start("runs", total, 0, left=left)

    def report(done: int, failed: int, seconds: float, line: str) -> None:
        ended = done + failed
        line = f"[{ended}/{total}] {line}"
        if ended < total:
            line += f"; about {duration(seconds)} left"
        left.end = time.monotonic() + seconds
        progress.values({"failed": failed} if failed else {})
        progress.note(line, ended)

    try:
        yield report
    finally:
        progress.close()
