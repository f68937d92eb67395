"""`dipole sweep`: ask for values, train on them, prune, tell. Then the winner's seeds on the test part."""

import hashlib
import json
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dipole.benchmarks.manifest import read_records
from dipole.benchmarks.plan import unknown_metrics
from dipole.benchmarks.run.bench import EngineName, finished, make_engine, make_runs_folder, run_jobs
from dipole.benchmarks.run.engine import Engine, EngineTask, LocalEngine, TaskResult, visible_gpus
from dipole.benchmarks.run.worker import ask_to_stop
from dipole.benchmarks.suite import Job
from dipole.benchmarks.sweep.study import SWEEPS, Dimension, Study, Value, corners, path_of, read_space, settings
from dipole.core.cli.output import write
from dipole.core.record import read_record
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load_recipe
from dipole.core.utils.errors import ConfigError, ReceivedError, nearest
from dipole.core.utils.files import disk_refusing
from dipole.core.utils.machine import processors
from dipole.core.utils.text import counted

CHOOSING = "train.evaluate_on=validation"
LOOK_EVERY = 1.0  # seconds between two looks at what a running trial has measured
MOST_FAILURES = 3  # so many failed trials without a finished one end a search: the settings are wrong


def sweep(
    recipe: str,
    space: Sequence[str],
    metric: str,
    trials: int = 20,
    minimize: bool = False,
    seeds: int = 3,
    overrides: Sequence[str] = (),
    runs: Path = Path("runs"),
    engine: EngineName = "local",
    jobs: int | None = None,
    threads: int | None = None,
    name: str | None = None,
    seed: int = 0,
    slurm: Mapping[str, str] | None = None,
    answer: dict[str, Any] | None = None,
) -> int:
    """Search, and train the winner. The exit code is 1 if no trial finished or a run of the winner failed.

    The arguments are the options of `dipole sweep` (`commands.py`). `trials` counts those of earlier starts and other
    processes too. The search lies in the folder .sweeps of `runs`. `answer` is filled with what `--json` prints.
    """
    answer = {} if answer is None else answer
    search = _Search(recipe, overrides, read_space(space), metric, not minimize, name or "", runs)
    make_runs_folder(runs / SWEEPS)
    slots = make_engine(engine, jobs, threads, slurm=slurm).slots
    folder = runs / SWEEPS / search.name
    refusing = disk_refusing(f"cannot write the search {folder}")
    with refusing, closing(Study(folder, search.space, search.described, not minimize, seed)) as study:
        begun = len(study.spent())
        write(f"Search {search.name}: {begun} of {counted(trials, 'trial')} begun, {slots} at a time.", sys.stderr)
        with ThreadPoolExecutor(slots) as pool:
            engines = [_one_at_a_time(engine, threads, place, slots, slurm) for place in range(slots)]
            for future in [pool.submit(search.work, study, trials, each) for each in engines]:
                future.result()
        best = study.best
        if best is None:
            search.write(study, [])
            write("No trial finished.")
            return 1
        winner = [search.job(best.params, f"seed={number}") for number in range(seeds)]
        search.write(study, [job.hash for job in winner])
        chosen = ", ".join(settings(best.params, search.objective))
        number = counted(len(study.spent()), "trial")
        write(f"Best of {number}: number {best.number}, {metric} {best.value:.4g}: {chosen}")
        for key, share in study.importance().items():
            write(f"  {key}: {100 * share:.0f} % of the difference between good and bad trials")
    answer |= {"search": search.name, "best": best.value, "settings": best.params, "winner": [j.hash for j in winner]}
    records = read_records(runs).done
    summary = run_jobs(winner, records, runs, make_engine(engine, jobs, threads, slurm=slurm))
    done = read_records(runs).done
    found = [done[job.hash].results.get(metric) for job in winner if job.hash in done]
    if values := [value for value in found if value is not None]:
        spread = f" +- {stdev(values):.4g}" if len(values) > 1 else ""
        write(
            f"On the test part: {metric} {fmean(values):.4g}{spread} over {counted(len(values), 'seed')} (validation "
            f"{best.value:.4g}). Report: dipole report {runs}; the search: {path_of(runs, search.name)}",
        )
    return int(bool(summary.failed))


def _one_at_a_time(
    engine: EngineName, threads: int | None, place: int, slots: int, slurm: Mapping[str, str] | None
) -> Engine:
    """Return an engine that runs one trial at a time, in its own part of the machine."""
    if engine != "local":
        return make_engine(engine, 1, threads, slurm=slurm)
    gpus = visible_gpus()
    return LocalEngine(1, threads or max(1, processors() // slots), gpus[place % max(1, len(gpus)) :][:1])


@dataclass
class _Search:
    """A recipe, a space, and the number by which trials are compared. Checks all of them."""

    recipe: str
    overrides: Sequence[str]
    space: Sequence[Dimension]
    metric: str
    maximize: bool
    name: str  # or "": by content
    runs: Path

    def __post_init__(self) -> None:
        if not self.space:
            raise ConfigError("a search needs --space, such as --space 'train.learning_rate=log(1e-4, 1e-2)'.")
        base = load_recipe(self.recipe, [*self.overrides, CHOOSING]).config
        space = [str(each) for each in self.space]
        self.described = {"recipe": base.hash, "space": space, "metric": self.metric, "maximize": self.maximize}
        digest = hashlib.sha256(json.dumps(self.described, sort_keys=True).encode()).hexdigest()[:8]
        self.name = self.name or f"{Path(self.recipe).stem}-{digest}"
        if Path(self.name).name != self.name or self.name.startswith("."):
            raise ConfigError(f"--name: {self.name!r} is no name of a file.")
        self.objective, self._lock, self._failures = base.objective, threading.RLock(), 0
        for corner in corners(self.space):
            self.job(corner, CHOOSING)
        if base.train.evaluate_every is None:
            write("Trials are not pruned: the recipe evaluates only at the end (train.evaluate_every).", sys.stderr)
        for line in unknown_metrics([self.metric], finished(self.runs).values()):
            write(f"{line} A search whose first trial lacks it ends.", sys.stderr)

    def job(self, values: dict[str, Value], last: str) -> Job:
        overrides = (*self.overrides, *settings(values, self.objective), last)
        config = load_recipe(self.recipe, overrides).config
        return Job(config.hash, config, self.recipe, overrides)

    def work(self, study: Study, trials: int, engine: Engine) -> None:
        """Run trials one after the other until the wanted number is started. Every slot of a search does this."""
        while self._failures < MOST_FAILURES or study.best is not None:
            asked = study.ask(trials)
            if asked is None:
                return
            self._run(study, engine, *asked)

    def _run(self, study: Study, engine: Engine, trial: Any, values: dict[str, Value]) -> None:
        job, ended = self.job(values, CHOOSING), threading.Event()
        trial.set_user_attr("run", job.hash)
        self.write(study, [])
        with ThreadPoolExecutor(1) as pool:
            watched = pool.submit(self._prune, trial, job.hash, ended)
            try:
                (result,) = engine.run([EngineTask(job.hash, f"trial {trial.number}", job.command)], self.runs)
            finally:
                ended.set()
            is_pruned = watched.result()
        value, outcome = self._judge(result)
        is_pruned = is_pruned and value is None
        study.finish(trial, value, is_pruned)
        with self._lock:
            if is_pruned:
                outcome = "pruned"
            elif value is None:
                self._failures += 1
            write(f"trial {trial.number}: {outcome}  ({', '.join(settings(values, self.objective))})", sys.stderr)
        self.write(study, [])

    def _prune(self, trial: Any, run: str, ended: threading.Event) -> bool:
        """Report what a running trial measures. Stop it, and return True, if the search has seen enough."""
        reported: set[int] = set()
        lines: list[dict[str, Any]] = []
        while not ended.wait(LOOK_EVERY):
            with suppress(ReceivedError, OSError):  # there is no file yet
                lines = read_metrics(self.runs / run / "metrics.jsonl")
            for line in lines:
                step, value = line["step"], line.get(f"eval/{self.metric}")
                if step in reported or not isinstance(value, int | float):
                    continue
                reported.add(step)
                trial.report(value, step)
                if trial.should_prune():
                    ask_to_stop(self.runs, run)
                    return True
        return False

    def _judge(self, result: TaskResult) -> tuple[float | None, str]:
        """Return the metric of a trial, or None with the reason."""
        if result.status != "done":
            return None, f"FAILED: {result.message}  (log: {result.log})"
        results, metric = read_record(self.runs / result.task.hash / "record.json").results, self.metric
        if metric not in results:
            raise ConfigError(
                f"--metric: the evaluation has no {metric!r}.{nearest(metric, results)} It has: {', '.join(results)}."
            )
        value = results[metric]
        if value is None or not math.isfinite(value):
            return None, f"FAILED: {metric} is not finite"
        return value, f"{metric} {value:.4g}"

    def write(self, study: Study, winner: list[str]) -> None:
        with self._lock:
            study.write(self.recipe, self.metric, self.maximize, winner)
