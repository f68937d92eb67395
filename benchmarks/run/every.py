"""`dipole bench --all`: every shipped suite, what costs least first. It may be stopped, and goes on where it was."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console

from dipole.benchmarks.kept import kept_overrides, known_runs
from dipole.benchmarks.manifest import manifest
from dipole.benchmarks.plan import Estimator, Time
from dipole.benchmarks.run.bench import finished, make_engine, run_suite, summed_up
from dipole.benchmarks.run.terminal import consoles, print_summary, reckoning, say
from dipole.benchmarks.suite import Job, ScaleName, Sized, read_suite, suites
from dipole.core.utils.text import are, counted


def bench_all(
    scale: ScaleName = "small",
    runs: Path = Path("runs"),
    jobs: int | None = None,
    threads: int | None = None,
    within: float = inf,
    known: Sequence[Path] = (),
    console: Console | None = None,
    answer: dict[str, Any] | None = None,
) -> int:
    """Run what is missing of every suite, those that take longest last; the exit code is 1 if a job failed.

    Runs on this machine's cores share processes, as starting one takes longer than many of them.

    Args:
        scale, runs, jobs, threads, known: as for `bench`.
        within: hours; a suite that takes longer by the plan is left out.
        answer: filled with what `--json` prints.
    """
    answer = {} if answer is None else answer
    console, aside = consoles(console)
    elsewhere = known_runs(known)
    say(aside, f"Times are reckoned {reckoning()}")
    summaries = []
    for sized, wanted, time in by_cost(scale, runs, jobs, threads, elsewhere, kept_overrides(known)):
        name = f"{sized.suite.name} ({scale})"
        if time.seconds > 3600 * within:
            say(aside, f"{name} is left out: {time}.")
            continue
        records = elsewhere | finished(runs)
        if all(job.hash in records for job in wanted):
            say(aside, f"{name}: all of its {counted(len(wanted), 'run')} {are(len(wanted))} finished.")
            continue
        say(aside, f"{name}: {time}.")
        engine = make_engine("local", jobs, threads, shared_process=sized.scale.processes == 1)
        summary = run_suite(sized, wanted, manifest(sized, wanted), records, runs, engine, aside)
        print_summary(console, sized, summary, runs)
        summaries.append({"suite": sized.suite.name, **summed_up(summary)})
    answer |= {"scale": scale, "runs": str(runs), "suites": summaries}
    return 1 if any(each["failed"] for each in summaries) else 0


def by_cost(
    scale: ScaleName,
    runs: Path,
    jobs: int | None,
    threads: int | None,
    elsewhere: dict[str, Any],
    changed: Mapping[tuple[str, str], Sequence[str]],
) -> list[tuple[Sized, list[Job], Time]]:
    """Every shipped suite of a scale with its jobs and the time that what is missing takes, the shortest first.

    `changed` is what the results that are known were made with, by suite and scale.
    """
    records = elsewhere | finished(runs)
    estimator, slots = Estimator(records.values()), make_engine("local", jobs, threads).slots
    found = []
    for name in suites():
        suite = read_suite(name)
        if scale in suite.scale:
            sized = suite.at(scale, changed.get((name, scale), ()))
            wanted = sized.jobs()
            missing = [job.config for job in wanted if job.hash not in records]
            found.append((sized, wanted, estimator.total(missing, slots)))
    return sorted(found, key=lambda each: each[2].seconds)
