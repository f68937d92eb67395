"""`dipole bench`: expand a suite, run what is missing, show progress and the time left, print the results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from dipole.benchmarks.manifest import read_manifests, write_manifest
from dipole.benchmarks.plan import Estimator, Time, faults, make_plan, missing_data
from dipole.benchmarks.results_file import SHIPPED_NAME, known_runs, merged_manifests, shipped_runs, stored_overrides
from dipole.benchmarks.run.engine import Engine, EngineTask, LocalEngine, PoolEngine, TaskResult
from dipole.benchmarks.run.reference import basis
from dipole.benchmarks.run.terminal import (
    SuiteSummary,
    consoles,
    print_plan,
    print_results,
    print_summary,
    reporter,
    say,
)
from dipole.benchmarks.suite import Job, ScaleName, Sized, read_suite, suites
from dipole.benchmarks.suite_results import SuiteResults, gather
from dipole.core.record import RunRecord, read_record
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.files import disk_refusing
from dipole.core.utils.progress import duration
from dipole.core.utils.text import are, counted, text_table

EngineName = Literal["local", "ray", "slurm"]


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

    The arguments are the options of `dipole bench` (`commands.py`). Without `scale`: small, or the suite's only one.
    `answer` is filled with what `--json` prints, and `mentions_shipped` says whether to mention shipped results of this
    suite.
    """
    answer = {} if answer is None else answer
    console, stderr = consoles()
    suite = read_suite(name)
    if scale is None and "small" in suite.scale:
        scale = "small"
    scale = scale or "paper"
    sized = suite.at(scale, overrides, seeds)
    wanted = sized.jobs()
    records = known_runs(known) | finished(runs)
    answer |= {"suite": name, "scale": scale}
    if plan_only:
        # A plan for a cluster needs no cluster.
        slots = jobs or 1
        if engine == "local":
            slots = make_engine(engine, jobs, threads, slurm=slurm).slots
        plan = make_plan(sized, wanted, records, slots, effect)
        print_plan(console, sized, plan)
        todo = [job for job in wanted if job.hash not in records]
        found = (*faults(wanted, sized.scale.processes), *missing_data(todo))
        cells = [
            {"row": cell.row, "column": cell.column, "seed": cell.seed, "run": job.hash, "command": job.command}
            for job in wanted
            for cell in job.cells
        ]
        answer |= {**plan.as_dict(), "faults": [str(fault) for fault in found], "cells": cells}
        for fault in found:
            say(console, f"cannot run: {fault}")
        return int(bool(found))
    chosen = make_engine(engine, jobs, threads, sized.scale.shared_process, slurm)
    missing = {job.hash for job in wanted if job.hash not in records}
    if mentions_shipped and not known and (count := len(shipped_runs(sized) & missing)):
        say(stderr, f"dipole ships the results of {count} of {len(wanted)} runs: --known {SHIPPED_NAME}.")
    if not overrides and (kept := stored_overrides(known).get((sized.suite.name, scale))):
        settings = " ".join(f"--set {quote(each)}" for each in kept)
        say(stderr, f"The known results were made with {settings}. Add this, or all runs are repeated.")
    left = [job for job in wanted if job.hash in missing]
    faulty = missing_data(left)
    failing = {cell for fault in faulty for cell in fault.cells}
    if faulty and all(failing.issuperset(job.cells) for job in left):
        raise DataError("\n".join(map(str, faulty)))
    for fault in faulty:
        say(stderr, f"will fail: {fault}")
    summary = run_suite(sized, wanted, records, runs, chosen)
    print_results(console, SuiteResults(sized.manifest(wanted), gather([runs, *known]).records))
    print_summary(console, sized, summary, runs)
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


@dataclass(frozen=True)
class _Planned:
    """A shipped suite with its jobs and the time that the missing ones take."""

    sized: Sized
    jobs: list[Job]
    time: Time


def _plan_shipped(
    scale: ScaleName, records: Mapping[str, RunRecord], known: Sequence[Path], estimator: Estimator, slots: int
) -> list[_Planned]:
    """Plan every shipped suite of a scale, with the settings its known results were made with."""
    changed, found = stored_overrides(known), []
    for name in suites():
        suite = read_suite(name)
        if scale in suite.scale:
            sized = suite.at(scale, changed.get((name, scale), ()))
            wanted = sized.jobs()
            missing = [job.config for job in wanted if job.hash not in records]
            time = estimator.total(missing, slots, shares_processes=sized.scale.processes == 1)
            found.append(_Planned(sized, wanted, time))
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
    console, _ = consoles()
    records = known_runs(known) | finished(runs)
    estimator, slots = Estimator(records.values()), LocalEngine(jobs, threads).slots
    planned = _plan_shipped(scale, records, known, estimator, slots)
    rows = [("suite", "runs", "finished", "estimated time")]
    problems, absent, notes, lines = [], [], [], []
    for each in planned:
        name, hashes = each.sized.suite.name, {job.hash for job in each.jobs}
        rows.append((name, str(len(hashes)), str(len(hashes & records.keys())), str(each.time)))
        lines.append({"suite": name, "runs": len(hashes), "seconds": each.time.seconds, "within": each.time.within})
        problems += [f"{name}: {fault}" for fault in faults(each.jobs, each.sized.scale.processes)]
        absent += [f"{name}: {fault}" for fault in missing_data([job for job in each.jobs if job.hash not in records])]
        if each.sized.overrides:
            notes.append(f"{name}: as its results are kept, with --set {' '.join(each.sized.overrides)}")
    every = {job.hash: job.config for each in planned for job in each.jobs}
    missing = [config for name, config in every.items() if name not in records]
    total = estimator.total(missing, slots, shares_processes=True)
    rows.append(("all (shared runs once)", str(len(every)), str(len(every) - len(missing)), str(total)))
    say(console, f"Shipped suites at scale {scale}, {counted(slots, 'run')} at a time\n")
    for line in (text_table(rows), "", basis(), *notes, *(f"cannot run: {problem}" for problem in problems + absent)):
        say(console, line)
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

    It may be stopped at any time, and continues when it is started again. Runs share processes, as starting a process
    takes longer than many of them. A suite that takes longer than `within` hours by the plan is left out. The other
    arguments are those of `bench`.
    """
    answer = {} if answer is None else answer
    console, stderr = consoles()
    elsewhere = known_runs(known)
    say(stderr, f"Times are reckoned {basis()}")
    records = elsewhere | finished(runs)
    estimator, slots = Estimator(records.values()), PoolEngine(jobs, threads).slots
    summaries = []
    for each in sorted(_plan_shipped(scale, records, known, estimator, slots), key=lambda each: each.time.seconds):
        name = f"{each.sized.suite.name} ({scale})"
        records = elsewhere | finished(runs)
        if each.time.seconds > 3600 * within:
            say(stderr, f"{name} is left out: {each.time}.")
        elif all(job.hash in records for job in each.jobs):
            say(stderr, f"{name}: nothing to do, {counted(len(each.jobs), 'run')} finished.")
        else:
            say(stderr, f"{name}: {each.time}.")
            engine = make_engine("local", jobs, threads, shared_process=each.sized.scale.processes == 1)
            summary = run_suite(each.sized, each.jobs, records, runs, engine)
            print_summary(console, each.sized, summary, runs)
            summaries.append({"suite": each.sized.suite.name, **summary.as_dict()})
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
        from dipole.benchmarks.run.slurm_engine import SlurmEngine

        return SlurmEngine(jobs, threads, slurm)
    if engine == "ray":
        from dipole.benchmarks.run.ray_engine import RayEngine

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
    estimator, skipped, (_, stderr) = Estimator(records.values()), len(jobs) - len(tasks), consoles()
    failed: list[TaskResult] = []
    done = 0
    if skipped:
        say(stderr, f"{skipped} of {counted(len(jobs), 'run')} {are(skipped)} finished already.")
    with reporter(stderr, len(tasks)) as report:

        def show(line: str) -> None:
            left = estimator.total(list(waiting.values()), engine.slots, engine.shares_processes)
            report(done, len(failed), left.seconds, line)

        if tasks:
            show(f"{counted(len(tasks), 'run')}, {engine.slots} at a time")
        for result in engine.run(tasks, runs):
            config = waiting.pop(result.task.hash)
            if result.status == "done":
                done += 1
                # The record's time: another runner may have done the work, a resumed run took more than this attempt.
                estimator.add(config, read_record(runs / result.task.hash / "record.json").wall_seconds)
                show(f"done    {result.task.hash}  {result.task.label}  ({duration(result.seconds)})")
            else:
                failed.append(result)
                show(f"FAILED  {result.task.hash}  {result.task.label}: {result.message}  (log: {result.log})")
    return SuiteSummary(done, tuple(failed), skipped)
