"""Before anything is run: how many jobs, how long by earlier records, what cannot be built, and how many seeds."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean, median
from typing import Any

import numpy as np

from dipole.benchmarks.report import published
from dipole.benchmarks.report.comparison import margin
from dipole.benchmarks.report.results import measure
from dipole.benchmarks.statistics import seeds_needed
from dipole.benchmarks.suite import Cell, Job, Sized
from dipole.core.ground.errors import DipoleError
from dipole.core.record import RunRecord
from dipole.core.train.build import construct
from dipole.core.train.config import RunConfig


class Estimator:
    """Seconds of a run, the median of earlier ones: same settings, else any objective, else same domain and length."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        for record in records:
            if record.status == "done" and record.wall_seconds > 0:
                for key in _kinds(record.config):
                    self._seconds[key].append(record.wall_seconds)

    def add(self, config: RunConfig, seconds: float) -> None:
        """Learn from a run that has just ended."""
        for key in _kinds(config.model_dump(mode="json")):
            self._seconds[key].append(seconds)

    def seconds(self, config: RunConfig) -> float | None:
        """Estimated wall time of one run, None where nothing like it was ever run."""
        for key in _kinds(config.model_dump(mode="json")):
            if key in self._seconds:
                return median(self._seconds[key])
        return None

    def total(self, configs: Sequence[RunConfig], slots: int) -> tuple[float | None, int]:
        """Wall time of several runs on `slots` places, and how many of them had to be guessed from the others."""
        known = [seconds for c in configs if (seconds := self.seconds(c)) is not None]
        if not known:
            return (0.0 if not configs else None), len(configs)
        guessed = len(configs) - len(known)
        rounds = max((sum(known) + guessed * fmean(known)) / slots, max(known))
        return rounds, guessed


@dataclass(frozen=True)
class SeedsLine:
    """How many seeds per arm show `difference` in a column, given its spread and where the spread is from."""

    column: str
    difference: float
    std: float
    source: str
    seeds: int | None


@dataclass(frozen=True)
class Fault:
    """Why runs cannot be built, and the cells they are of."""

    message: str
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        first, more = self.cells[0], len(self.cells) - 1
        others = f" and {more} more {'cell' if more == 1 else 'cells'}" if more else ""
        return f"row {first.row!r}, column {first.column!r}, seed {first.seed}{others}: {self.message}"


@dataclass(frozen=True)
class Plan:
    """What `--plan` prints."""

    jobs: int
    cells: int
    finished: int
    seconds: float | None
    guessed: int
    slots: int
    seeds: tuple[SeedsLine, ...]


def faults(jobs: Sequence[Job], processes: int) -> tuple[Fault, ...]:
    """What of the jobs cannot be built as it is set: encoder, taps and objective of each, without data or memory."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for job in jobs:
        try:
            construct(job.config, processes)
        except DipoleError as error:
            found[" ".join(str(error).split())].extend(job.cells)
    return tuple(Fault(message, tuple(cells)) for message, cells in found.items())


def make_plan(
    sized: Sized, jobs: Sequence[Job], records: Mapping[str, RunRecord], slots: int, effect: float | None
) -> Plan:
    """Plan a suite: `records` are the finished runs of the folder; `effect` is a difference in units of the columns.

    Without `effect`, a column's difference is the smallest that matters for its metric (see `margin`) or,
    where nothing is published, one percentage point (0.01 of a fraction times the column's factor).
    """
    missing = [job.config for job in jobs if job.hash not in records]
    seconds, guessed = Estimator(records.values()).total(missing, slots)
    cells = sum(1 for _ in sized.cells())
    lines = tuple(_seeds_line(sized, column.name, jobs, records, effect) for column in sized.columns)
    return Plan(len(jobs), cells, len(jobs) - len(missing), seconds, guessed, slots, lines)


def _seeds_line(
    sized: Sized, name: str, jobs: Sequence[Job], records: Mapping[str, RunRecord], effect: float | None
) -> SeedsLine:
    column = next(c for c in sized.columns if c.name == name)
    rows = {row.label: row for row in sized.rows}
    by_row: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        for cell in job.cells if job.hash in records else ():
            value = measure(records[job.hash], column.metric_of(rows[cell.row]))
            if cell.column == name and value is not None:
                by_row[cell.row].append(value * column.factor)
    spreads = [float(np.var(values, ddof=1)) for values in by_row.values() if len(values) > 1]
    table = published.tables().get(sized.suite.published or "")
    printed = [r.cells[name].std for r in table.rows if name in r.cells] if table else []
    printed_spreads = [std for std in printed if std is not None]
    if spreads:
        std, source = float(np.sqrt(np.mean(spreads))), f"{sum(map(len, by_row.values()))} earlier runs"
    elif printed_spreads:
        std, source = float(np.sqrt(np.mean(np.square(printed_spreads)))), "the paper's spread"
    else:
        std, source = nan, "no spread known yet: run two seeds first"
    difference = effect
    if difference is None:
        difference = margin(table.metric, 1.0) if table else 0.01 * column.factor
    return SeedsLine(name, difference, std, source, seeds_needed(difference, std))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Keys of a configuration from narrow to wide."""
    rest = {k: v for k, v in _without_none(config).items() if k not in ("name", "description", "seed")}
    narrow = json.dumps(rest, sort_keys=True)
    any_objective = json.dumps({k: v for k, v in rest.items() if k != "objective"}, sort_keys=True)
    train = rest.get("train")
    train = train if isinstance(train, Mapping) else {}
    wide = json.dumps([rest.get("domain"), train.get("epochs"), train.get("steps"), train.get("batch_size")])
    return [f"same:{narrow}", f"objective:{any_objective}", f"length:{wide}"]


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in values.items() if v is not None}
