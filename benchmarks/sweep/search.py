"""`dipole sweep`: ask for values, train on them, prune, tell. Then the winner's seeds on the test part."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from dipole.benchmarks.run.bench import EngineName, make_engine, make_runs_folder, run_jobs
from dipole.benchmarks.run.engine import Engine
from dipole.benchmarks.run.tasks import Result, Task
from dipole.benchmarks.run.terminal import consoles, say
from dipole.benchmarks.run.worker import ask_to_stop
from dipole.benchmarks.run_records import read_records
from dipole.benchmarks.suite import Job
from dipole.benchmarks.sweep.space import Dimension, Value, corners, read_space, settings
from dipole.benchmarks.sweep.study import SWEEPS, Study, opened
from dipole.benchmarks.sweep.summary import path_of, write_summary
from dipole.core.record import read_record
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load
from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.text import counted

CHOOSING = "train.evaluate_on=validation"
LOOK_EVERY = 1.0
"""Seconds between two looks at what a running trial has measured."""
MOST_FAILURES = 3
"""So many failed trials without a finished one end a search: it is the settings, then."""


@dataclass(frozen=True)
class Search:
    """A recipe, a space, and the number by which trials are compared."""

    recipe: str
    overrides: tuple[str, ...]
    space: tuple[Dimension, ...]
    metric: str
    maximize: bool
    name: str

    def settings(self, values: dict[str, Value], objective: str) -> tuple[str, ...]:
        return (*self.overrides, *settings(values, objective))


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
    console: Console | None = None,
    answer: dict[str, Any] | None = None,
) -> int:
    """Search, and train the winner. The exit code is 1 if no trial finished or a run of the winner failed.

    Args:
        recipe: a shipped recipe or the path of one.
        space: texts such as "train.learning_rate=log(1e-4, 1e-2)" (`read_space`).
        metric: a number of the evaluation, such as "linear/accuracy", on the validation part.
        trials: of the whole search, those of earlier starts and other processes included.
        minimize: whether less is better.
        seeds: seeds 0 to N-1 of the winner, evaluated on the test part.
        overrides: settings of every run.
        runs: folder of runs. The search lies in its folder .sweeps.
        engine, jobs, threads: where trials run, as for `dipole bench`.
        name: of the search. By default the recipe's with a hash of what is searched.
        seed: of the proposals.
        slurm: options of sbatch, for the engine "slurm".
        answer: filled with what `--json` prints.
    """
    answer = {} if answer is None else answer
    console, aside = consoles(console)
    dimensions = read_space(space)
    if not dimensions:
        raise ConfigError("a search needs --space, such as --space 'train.learning_rate=log(1e-4, 1e-2)'.")
    base = load(recipe, [*overrides, CHOOSING]).config
    described = {
        "recipe": base.hash, "space": [str(each) for each in dimensions], "metric": metric, "maximize": not minimize,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:8]
    search = Search(recipe, tuple(overrides), dimensions, metric, not minimize, name or f"{Path(recipe).stem}-{digest}")
    if Path(search.name).name != search.name or search.name.startswith("."):
        raise ConfigError(f"--name: {search.name!r} is no name of a file.")
    for corner in corners(dimensions):
        load(recipe, [*search.settings(corner, base.objective), CHOOSING])
    if base.train.evaluate_every is None:
        say(aside, "Trials are not pruned: the recipe evaluates only at the end (train.evaluate_every).")
    make_runs_folder(runs / SWEEPS)
    slots = make_engine(engine, jobs, threads, slurm=slurm).slots
    folder = runs / SWEEPS / search.name
    with opened(folder, dimensions, described, not minimize, seed) as study:
        driver = _Driver(search, study, base.objective, runs, trials, aside)
        say(
            aside,
            f"Search {search.name}: {len(study.spent())} of {counted(trials, 'trial')} begun, {slots} at a time.",
        )
        with ThreadPoolExecutor(slots) as pool:
            one_each = [_single(engine, threads, place, slots, slurm) for place in range(slots)]
            for future in [pool.submit(driver.work, each) for each in one_each]:
                future.result()
        best = study.best
        if best is None:
            driver.put_down([])
            say(console, "No trial finished.")
            return 1
        winner = [_winner(search, best.params, base.objective, number, runs) for number in range(seeds)]
        driver.put_down([job.hash for job in winner])
        chosen = ", ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                           for key, value in best.params.items())  # fmt: skip
        say(
            console,
            f"Best of {counted(len(study.spent()), 'trial')}: number {best.number}, {metric} {best.value:.4g}: "
            f"{chosen}",
        )
        for key, share in study.importance().items():
            say(console, f"  {key}: {100 * share:.0f} % of what tells good trials from others")
    records = read_records(runs).done
    answer |= {"search": search.name, "best": best.value, "settings": best.params, "winner": [j.hash for j in winner]}
    summary = run_jobs(winner, records, runs, make_engine(engine, jobs, threads, slurm=slurm), aside)
    _tell_test(console, search, winner, runs, best.value)
    return 1 if summary.failed else 0


def _single(engine: EngineName, threads: int | None, place: int, slots: int, slurm: Mapping[str, str] | None) -> Engine:
    """An engine that runs one trial at a time, in its own part of the machine."""
    if engine == "local":
        from dipole.benchmarks.run.local_engine import LocalEngine, visible_gpus
        from dipole.core.utils.machine import processors

        gpus = visible_gpus()
        mine = [gpus[place % len(gpus)]] if gpus else []
        return LocalEngine(1, threads or max(1, processors() // slots), mine)
    return make_engine(engine, 1, threads, slurm=slurm)


class _Driver:
    """The loop that every slot of a search runs."""

    def __init__(self, search: Search, study: Study, objective: str, runs: Path, trials: int, console: Console) -> None:
        self._search, self._study, self._objective = search, study, objective
        self._runs, self._trials, self._console = runs, trials, console
        self._lock = threading.RLock()
        self._failed: list[str] = []

    def work(self, engine: Engine) -> None:
        """Take one trial after the other until as many as wanted are begun."""
        while self._go_on() and (asked := self._study.ask(self._trials)) is not None:
            self._one(engine, *asked)

    def _go_on(self) -> bool:
        return len(self._failed) < MOST_FAILURES or self._study.best is not None

    def _one(self, engine: Engine, trial: Any, values: dict[str, Value]) -> None:
        search = self._search
        overrides = (*search.settings(values, self._objective), CHOOSING)
        config = load(search.recipe, overrides).config
        job = Job(config.hash, config, search.recipe, overrides)
        trial.set_user_attr("run", job.hash)
        self.put_down([])
        watch = _Watch(trial, self._runs, job.hash, search.metric)
        with watch:
            (result,) = engine.run([Task(job.hash, f"trial {trial.number}", job.command)], self._runs)
        value, said = self._judge(result)
        pruned = value is None and watch.pruned
        self._study.finish(trial, value, pruned)
        with self._lock:
            if value is None and not pruned:
                self._failed.append(said)
            shown = "pruned" if pruned else said
            say(self._console, f"trial {trial.number}: {shown}  ({', '.join(overrides[len(search.overrides) : -1])})")
            self.put_down([])

    def _judge(self, result: Result) -> tuple[float | None, str]:
        if result.status != "done":
            return None, f"FAILED: {result.message}  (log: {result.log})"
        results = read_record(self._runs / result.task.hash / "record.json").results
        metric = self._search.metric
        if metric not in results:
            raise ConfigError(
                f"--metric: the evaluation has no {metric!r}.{nearest(metric, results)} It has: {', '.join(results)}."
            )
        value = results[metric]
        if value is None or not math.isfinite(value):
            return None, f"FAILED: {metric} is not finite"
        return value, f"{metric} {value:.4g}"

    def put_down(self, winner: list[str]) -> None:
        search = self._search
        about = {"name": search.name, "recipe": search.recipe, "metric": search.metric, "maximize": search.maximize}
        with self._lock:
            write_summary(self._runs, self._study, about, winner)


class _Watch:
    """Reports what a running trial measures, and ends it where the search has seen enough."""

    def __init__(self, trial: Any, runs: Path, run: str, metric: str) -> None:
        self._trial, self._runs, self._run, self._metric = trial, runs, run, metric
        self._ended = threading.Event()
        self._told: set[int] = set()
        self.pruned = False

    def __enter__(self) -> _Watch:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            for step, value in self._seen():
                if step in self._told:
                    continue
                self._told.add(step)
                self._trial.report(value, step)
                if self._trial.should_prune():
                    self.pruned = True
                    ask_to_stop(self._runs, self._run)
                    return

    def _seen(self) -> list[tuple[int, float]]:
        path, name = self._runs / self._run / "metrics.jsonl", f"eval/{self._metric}"
        try:
            lines = read_metrics(path) if path.is_file() else []
        except Exception:  # a line that is half written
            return []
        return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def _winner(search: Search, values: dict[str, Value], objective: str, seed: int, runs: Path) -> Job:
    overrides = (*search.settings(values, objective), f"seed={seed}")
    config = load(search.recipe, overrides).config
    return Job(config.hash, config, search.recipe, overrides)


def _tell_test(console: Console, search: Search, winner: Sequence[Job], runs: Path, chosen: float) -> None:
    done = read_records(runs).done
    values = [done[job.hash].results.get(search.metric) for job in winner if job.hash in done]
    numbers = [value for value in values if value is not None]
    if not numbers:
        return
    spread = f" +- {stdev(numbers):.4g}" if len(numbers) > 1 else ""
    say(
        console,
        f"On the test part: {search.metric} {fmean(numbers):.4g}{spread} over {counted(len(numbers), 'seed')} "
        f"(validation {chosen:.4g}). Report: dipole report {runs}; the search: {path_of(runs, search.name)}",
    )
