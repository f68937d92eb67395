"""`dipole bench`: expand a suite, run what is missing, show progress and time left, sum up."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from dipole.benchmarks.collecting import gather
from dipole.benchmarks.kept import SHIPPED_NAME, kept_of, kept_overrides, known_runs
from dipole.benchmarks.manifest import Manifest, manifest, write_manifest
from dipole.benchmarks.plan import Estimator, Time, faults, make_plan
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.run.engines import Engine, LocalEngine, PoolEngine
from dipole.benchmarks.run.tasks import Result, Task
from dipole.benchmarks.run.terminal import (
    Summary,
    consoles,
    print_plan,
    print_results,
    print_summary,
    reckoning,
    reporter,
    say,
)
from dipole.benchmarks.run_records import read_records
from dipole.benchmarks.suite import Job, ScaleName, Sized, read_suite, suites
from dipole.core.record import RunRecord, read_record
from dipole.core.train.config import RunConfig
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.files import why
from dipole.core.utils.progress import duration
from dipole.core.utils.text import are, counted

EngineName = Literal["local", "ray", "slurm"]


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
    slurm: Mapping[str, str] | None = None,
    console: Console | None = None,
    answer: dict[str, Any] | None = None,
    known: Sequence[Path] = (),
    tells_kept: bool = True,
) -> int:
    """Run what is missing of a suite; the exit code is 1 if a job failed, or could not be built where only planned.

    Args:
        name: a shipped suite or the path of a suite file.
        scale: "small" (minutes to hours on two cores) or "paper" (the paper's settings).
        runs: folder of runs; it is created.
        engine: "local" processes, a "ray" cluster, or jobs of "slurm".
        jobs, threads: jobs at a time and threads per job; default what the machine has.
        plan_only: print the number of jobs, the estimated time, the seeds needed and what cannot be built, and stop.
        effect: the difference that the plan's number of seeds is to show, in units of the columns.
        overrides: settings over those of every run, such as where data lie.
        seeds: number of seeds in place of the scale's own.
        slurm: options of sbatch, for the engine "slurm".
        answer: filled with what `--json` prints.
        known: results files, or folders of them, whose runs are not made again.
        tells_kept: whether it says that results of the suite come with dipole, where `known` has none.
    """
    answer = {} if answer is None else answer
    console, aside = consoles(console)
    sized = read_suite(name).at(scale, overrides, seeds)
    wanted = sized.jobs()
    elsewhere = known_runs(known)
    records = elsewhere | finished(runs)
    shared = sized.scale.shared_process
    chosen = make_engine(engine, jobs, threads, shared, slurm) if not plan_only or engine == "local" else None
    slots = chosen.slots if chosen else jobs or 1
    if plan_only:
        plan = make_plan(sized, wanted, records, slots, effect)
        print_plan(console, sized, plan)
        found = faults(wanted, sized.scale.processes)
        answer |= {"suite": name, "scale": scale, **plan.as_dict(), "faults": [str(fault) for fault in found]}
        answer["cells"] = [
            {"row": c.row, "column": c.column, "seed": c.seed, "run": job.hash, "command": job.command}
            for job in wanted
            for c in job.cells
        ]
        for fault in found:
            say(console, f"cannot run: {fault}")
        return 1 if found else 0
    assert chosen is not None
    if (
        tells_kept
        and not known
        and (count := len(kept_of(sized) & {job.hash for job in wanted if job.hash not in records}))
    ):
        say(
            aside,
            f"{count} of {len(wanted)} runs {'comes' if count == 1 else 'come'} with dipole as results: --known "
            f"{SHIPPED_NAME}.",
        )
    if not overrides and (kept := kept_overrides(known).get((sized.suite.name, scale))):
        settings = " ".join(f"--set {quote(each)}" for each in kept)
        say(aside, f"The results that are known were made with {settings}: give that, or all is run anew.")
    described = manifest(sized, wanted)
    summary = run_suite(sized, wanted, described, records, runs, chosen, aside)
    print_results(console, SuiteResults(described, elsewhere | read_records(runs).records))
    print_summary(console, sized, summary, runs)
    answer |= {"suite": name, "scale": scale, "runs": str(runs), **summed_up(summary)}
    return 1 if summary.failed else 0


def run_suite(
    sized: Sized,
    wanted: Sequence[Job],
    described: Manifest,
    records: dict[str, RunRecord],
    runs: Path,
    engine: Engine,
    console: Console,
) -> Summary:
    """Describe a suite in the runs folder and run what is missing of it."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot write the runs folder {runs}: {why(error)}") from error
    write_manifest(runs, described)
    return run_jobs(wanted, records, runs, engine, console, sized.scale.processes)


def summed_up(summary: Summary) -> dict[str, Any]:
    """How a suite ended, for `--json`."""
    failed = [
        {"run": each.task.hash, "label": each.task.label, "message": each.message, "log": str(each.log)}
        for each in summary.failed
    ]
    return {"done": summary.done, "skipped": summary.skipped, "failed": failed}


def finished(runs: Path) -> dict[str, RunRecord]:
    """The finished runs of a folder, those of results files in it included; none where it is not there yet."""
    return gather([runs]).collection.done if runs.is_dir() else {}


def plan_all(
    scale: ScaleName,
    runs: Path,
    jobs: int | None,
    threads: int | None,
    console: Console | None = None,
    answer: dict[str, Any] | None = None,
    known: Sequence[Path] = (),
) -> int:
    """Print a line per shipped suite: runs, how many of them are finished, estimated time; then what cannot be built.

    The exit code is 1 if there is anything of that kind.
    """
    console, _ = consoles(console)
    records, kept = known_runs(known) | finished(runs), kept_overrides(known)
    estimator, slots = Estimator(records.values()), LocalEngine(jobs, threads).slots
    notes: list[str] = []
    table = Table(title=f"Shipped suites at scale {scale}, {counted(slots, 'run')} at a time", title_justify="left",
                  box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
    for name in ("suite", "runs", "finished", "estimated time"):
        table.add_column(name, justify="left" if name == "suite" else "right")
    every: dict[str, RunConfig] = {}
    problems: list[str] = []
    lines: list[dict[str, Any]] = []
    for name in suites():
        suite = read_suite(name)
        if scale in suite.scale:
            changed = kept.get((name, scale), [])
            planned = suite.at(scale, changed).jobs()
            notes += [f"{name}: as its results are kept, with --set {' '.join(changed)}"] if changed else []
            problems += [f"{name}: {fault}" for fault in faults(planned, suite.scale[scale].processes)]
            wanted = {job.hash: job.config for job in planned}
            every |= wanted
            line = _plan_line(wanted, records, estimator, slots)
            lines.append({"suite": name, "runs": len(wanted), "seconds": line.seconds, "within": line.within})
            table.add_row(name, *_line_cells(wanted, records, line))
    table.add_section()
    whole = _plan_line(every, records, estimator, slots)
    table.add_row("all (shared runs once)", *_line_cells(every, records, whole))
    if answer is not None:
        answer |= {"scale": scale, "suites": lines, "seconds": whole.seconds, "faults": problems}
    console.print(table)
    say(console, reckoning())
    for note in notes:
        say(console, note)
    for problem in problems:
        say(console, f"cannot run: {problem}")
    return 1 if problems else 0


def _plan_line(wanted: dict[str, RunConfig], records: dict[str, RunRecord], estimator: Estimator, slots: int) -> Time:
    return estimator.total([config for name, config in wanted.items() if name not in records], slots)


def _line_cells(wanted: dict[str, RunConfig], records: dict[str, RunRecord], time: Time) -> tuple[str, str, str]:
    return str(len(wanted)), str(len(wanted.keys() & records.keys())), str(time)


def make_engine(
    engine: EngineName,
    jobs: int | None,
    threads: int | None,
    shared_process: bool = False,
    slurm: Mapping[str, str] | None = None,
) -> Engine:
    """Where jobs run; `shared_process`: many in one process, where the engine is this machine.

    Raises:
        ConfigError: for options of sbatch where it is not asked.
    """
    if slurm and engine != "slurm":
        raise ConfigError(f"--slurm {' '.join(f'{k}={v}' for k, v in slurm.items())} belongs to --engine slurm.")
    if engine == "slurm":
        from dipole.benchmarks.run.slurm_engine import SlurmEngine

        return SlurmEngine(jobs, threads, slurm)
    if engine == "ray":
        from dipole.benchmarks.run.ray_engine import RayEngine

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
        say(console, f"{skipped} of {counted(len(jobs), 'run')} {are(skipped)} finished already.")
    with reporter(console, len(tasks)) as report:
        started = f"{counted(len(tasks), 'run')}, {engine.slots} at a time" if tasks else ""
        report(0, 0, estimator.total(list(waiting.values()), engine.slots).seconds, started)
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
            report(done, len(failed), estimator.total(list(waiting.values()), engine.slots).seconds, line)
    return Summary(done, tuple(failed), skipped)


def label(job: Job) -> str:
    return f"{job.config.name}, {job.recipe}, seed {job.config.seed}"
