"""`dipole bench`: expand a suite, run what is missing, show progress and time left, sum up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as ProgressTask
from rich.table import Table
from rich.text import Text

from dipole.benchmarks import sheets
from dipole.benchmarks.collect import collect
from dipole.benchmarks.engines import Engine, LocalEngine, PoolEngine, Result, Task
from dipole.benchmarks.manifest import manifest, write_manifest
from dipole.benchmarks.plan import Estimator, Plan, make_plan
from dipole.benchmarks.results import SuiteResults
from dipole.benchmarks.suite import Job, ScaleName, Sized, read_suite, suites
from dipole.core.ground.errors import TrainingError
from dipole.core.ground.files import why
from dipole.core.ground.progress import duration
from dipole.core.record import RunRecord, read_record
from dipole.core.train.config import RunConfig

EngineName = Literal["local", "ray"]


@dataclass(frozen=True)
class Summary:
    """How a suite ended."""

    done: int
    failed: tuple[Result, ...]
    skipped: int


def bench(
    name: str,
    scale: ScaleName = "small",
    runs: Path = Path("runs"),
    engine: EngineName = "local",
    jobs: int | None = None,
    threads: int | None = None,
    plan_only: bool = False,
    effect: float | None = None,
    overrides: Sequence[str] = (),
    seeds: int | None = None,
    console: Console | None = None,
) -> int:
    """Run what is missing of a suite; the exit code is 1 if a job failed.

    Args:
        name: a shipped suite or the path of a suite file.
        scale: "small" (minutes to hours on two cores) or "paper" (the paper's settings).
        runs: folder of runs; it is created.
        engine: "local" processes or a "ray" cluster.
        jobs, threads: jobs at a time and threads per job; default what the machine has.
        plan_only: print the number of jobs, the estimated time and the seeds needed, and stop.
        effect: the difference that the plan's number of seeds is to show, in units of the columns.
        overrides: settings over those of every run, such as where data lie.
        seeds: number of seeds in place of the scale's own.
    """
    console = console or Console()
    sized = read_suite(name).at(scale, overrides, seeds)
    wanted = sized.jobs()
    records = collect(runs).done if runs.is_dir() else {}
    shared = sized.scale.shared_process
    chosen = make_engine(engine, jobs, threads, shared) if not plan_only or engine == "local" else None
    slots = chosen.slots if chosen else jobs or 1
    if plan_only:
        print_plan(console, sized, make_plan(sized, wanted, records, slots, effect))
        return 0
    assert chosen is not None
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot write the runs folder {runs}: {why(error)}") from error
    described = manifest(sized, wanted)
    write_manifest(runs, described)
    summary = run_jobs(wanted, records, runs, chosen, console, sized.scale.processes)
    print_results(console, SuiteResults(described, collect(runs).records))
    print_summary(console, sized, summary, runs)
    return 1 if summary.failed else 0


def plan_all(
    scale: ScaleName, runs: Path, jobs: int | None, threads: int | None, console: Console | None = None
) -> int:
    """Print a line per shipped suite: runs, how many of them are finished, estimated time."""
    console = console or Console()
    records = collect(runs).done if runs.is_dir() else {}
    estimator, slots = Estimator(records.values()), LocalEngine(jobs, threads).slots
    table = Table(title=f"Shipped suites at scale {scale}, {slots} runs at a time", title_justify="left")
    for name in ("suite", "runs", "finished", "estimated time"):
        table.add_column(name, justify="left" if name == "suite" else "right")
    every: dict[str, RunConfig] = {}
    for name in suites():
        suite = read_suite(name)
        if scale in suite.scale:
            wanted = {job.hash: job.config for job in suite.at(scale).jobs()}
            every |= wanted
            table.add_row(name, *_plan_line(wanted, records, estimator, slots))
    table.add_section()
    table.add_row("all (shared runs once)", *_plan_line(every, records, estimator, slots))
    console.print(table)
    return 0


def _plan_line(
    wanted: dict[str, RunConfig], records: dict[str, RunRecord], estimator: Estimator, slots: int
) -> tuple[str, str, str]:
    missing = [config for name, config in wanted.items() if name not in records]
    seconds, guessed = estimator.total(missing, slots)
    shown = "unknown" if seconds is None else duration(seconds) + (f" ({guessed} guessed)" if guessed else "")
    return str(len(wanted)), str(len(wanted) - len(missing)), shown


def make_engine(engine: EngineName, jobs: int | None, threads: int | None, shared_process: bool = False) -> Engine:
    if engine == "ray":
        from dipole.benchmarks.cluster import RayEngine

        return RayEngine(jobs, threads)
    return PoolEngine(jobs, threads) if shared_process else LocalEngine(jobs, threads)


def run_jobs(
    jobs: Sequence[Job],
    records: dict[str, RunRecord],
    runs: Path,
    engine: Engine,
    console: Console,
    processes: int = 1,
) -> Summary:
    """Run the jobs without a finished record, through failures to the end."""
    missing = {job.hash: job for job in jobs if job.hash not in records}
    skipped = len(jobs) - len(missing)
    tasks = [Task(job.hash, label(job), job.command, processes) for job in missing.values()]
    estimator = Estimator(records.values())
    waiting = {name: job.config for name, job in missing.items()}
    failed: list[Result] = []
    done = 0
    if skipped:
        _say(console, f"{skipped} of {len(jobs)} runs are finished already.")
    with _reporter(console, len(tasks)) as report:
        started = f"{len(tasks)} runs, {engine.slots} at a time" if tasks else ""
        report(0, 0, estimator.total(list(waiting.values()), engine.slots)[0], started)
        for result in engine.run(tasks, runs):
            config = waiting.pop(result.task.hash)
            if result.status == "done":
                done += 1
                # The record's time: another runner may have done the work, a resumed run took more than this attempt.
                estimator.add(config, read_record(runs / result.task.hash / "record.json").wall_seconds)
                line = f"done    {result.task.hash}  {result.task.label}  ({duration(result.seconds)})"
            else:
                failed.append(result)
                line = f"FAILED  {result.task.hash}  {result.task.label}: {result.message}  (log: {result.log})"
            report(done, len(failed), estimator.total(list(waiting.values()), engine.slots)[0], line)
    return Summary(done, tuple(failed), skipped)


def label(job: Job) -> str:
    return f"{job.config.name}, {job.recipe}, seed {job.config.seed}"


def print_plan(console: Console, sized: Sized, plan: Plan) -> None:
    left = plan.jobs - plan.finished
    _say(
        console,
        f"{sized.suite.name} ({sized.name}): {plan.cells} cells from {plan.jobs} runs, "
        f"{plan.finished} finished, {left} to do.",
    )
    if plan.seconds is None:
        shown = "unknown: no earlier run is like these; run one job to find out"
    else:
        guess = f", {plan.guessed} of {left} runs guessed from the others" if plan.guessed else ""
        shown = duration(plan.seconds) + guess
    _say(console, f"Estimated time with {plan.slots} at a time: {shown}.")
    table = Table(title="Seeds per arm for 80 % power (two-sided t-test at 0.05)", title_justify="left")
    for name in ("column", "difference", "spread", "spread from", "seeds", "planned"):
        table.add_column(name, justify="left" if name in ("column", "spread from") else "right")
    for line in plan.seeds:
        seeds = "-" if line.seeds is None else str(line.seeds)
        spread = "-" if line.std != line.std else f"{line.std:.3g}"
        planned = str(len(sized.seeds))
        table.add_row(escape(line.column), f"{line.difference:.3g}", spread, line.source, seeds, planned)
    console.print(table)


def print_results(console: Console, results: SuiteResults) -> None:
    """Ours beside the printed numbers, or the ranking and the results of a study."""
    if results.table is not None:
        shown = [sheets.beside_sheet(results)]
        if results.protocol_notes:
            _say(console, "Our protocol is not the paper's: " + "; ".join(results.protocol_notes) + ".")
    elif results.manifest.kind == "study":
        shown = [sheets.ranking_sheet(results.manifest.name, results.ranks()), sheets.results_sheet(results)]
    else:
        shown = [sheets.results_sheet(results)]
    for sheet in shown:
        if not sheet.rows:
            continue
        sheet = sheet.without_empty_columns()
        table = Table(title=escape(sheet.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name, is_numeric in zip(sheet.head, sheet.numeric, strict=True):
            table.add_column(escape(name), justify="right" if is_numeric else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*(escape(f"{c.text}\n{c.sub}" if c.sub else c.text) for c in row))
        console.print(table)
    for line in results.empty_columns:
        _say(console, line)


def print_summary(console: Console, sized: Sized, summary: Summary, runs: Path) -> None:
    _say(
        console,
        f"{sized.suite.name} ({sized.name}): {summary.done} runs done, {summary.skipped} were finished before, "
        f"{len(summary.failed)} failed.",
    )
    for result in summary.failed:
        _say(console, f"  {result.task.hash}  {result.task.label}: {result.message}")
        _say(console, f"    log: {result.log}")
        again = sheets.repeat([*result.task.command, "--runs", str(runs)], result.task.processes)
        _say(console, f"    again: {again}")


def _say(console: Console, text: str) -> None:
    """One plain line, however wide the terminal: names are neither coloured nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    return f"about {duration(seconds)} left" if seconds > 0 else "done any moment"


class _TimeLeft(ProgressColumn):
    """The estimate of when all will have ended, counted down between one ended run and the next."""

    def render(self, task: ProgressTask) -> Text:
        end = task.fields["end"]
        return Text(_left(None if end is None else end - time.monotonic()))


Report = Callable[[int, int, float | None, str], None]


class _reporter:  # noqa: N801
    """A progress bar on a terminal, one plain line per ended run otherwise."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _TimeLeft(),
        )
        self.progress = Progress(*columns, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Report:
        if self.progress is not None:
            self.progress.start()
            self.bar = self.progress.add_task("runs", total=self.total, end=None)
        return self.report

    def __exit__(self, *details: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def report(self, done: int, failed: int, seconds: float | None, line: str) -> None:
        if self.progress is not None:
            description = f"runs ({failed} failed)" if failed else "runs"
            end = None if seconds is None else time.monotonic() + seconds
            self.progress.update(self.bar, completed=done + failed, description=description, end=end)
            if line:
                _say(self.console, line)
        elif line:
            _say(
                self.console,
                f"[{done + failed}/{self.total}] {line}"
                + (f"; {_left(seconds)}" if done + failed < self.total else ""),
            )
