"""Plan a suite before it runs: number of jobs, time, seeds needed, and what cannot be built."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan, nan
from statistics import median
from typing import Any

import numpy as np

from dipole.benchmarks.claims.published import PrintedCell
from dipole.benchmarks.manifest import CellEntry, ColumnEntry
from dipole.benchmarks.results_file import SHIPPED, known_runs
from dipole.benchmarks.run.reference import START, Time, kind_of, reckon
from dipole.benchmarks.statistics import LEVEL, detectable, seeds_needed
from dipole.benchmarks.suite import Job, Sized, read_suite, suites
from dipole.benchmarks.suite_results import SuiteResults, numbers
from dipole.core.record import RunRecord
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.model import construct
from dipole.core.train.schedule import flat
from dipole.core.utils.errors import ConfigError, DipoleError, nearest
from dipole.core.utils.text import counted


class Estimator:
    """Estimate the seconds of a run by the median of earlier ones, of the narrowest kind that has any (`_kinds`)."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._table: dict[str, Time] = {}
        for record in records:
            if record.status == "done" and record.wall_seconds > 0:
                self.add(record)

    def add(self, record: RunRecord) -> None:
        for key in _kinds(record.config):
            self._seconds[key].append(record.wall_seconds)

    def seconds(self, config: RunConfig) -> float | None:
        """Estimated wall time of one run, None if nothing like it was ever run."""
        for key in _kinds(config.model_dump(mode="json")):
            if key in self._seconds:
                return median(self._seconds[key])
        return None

    def total(self, configs: Sequence[RunConfig], slots: int, shares_processes: bool = False) -> Time:
        """Return the wall time of several runs, `slots` at a time. Those without a similar earlier run are reckoned."""
        known = [self.seconds(config) for config in configs]
        left = [self._reckoned(config) for config, seconds in zip(configs, known, strict=True) if seconds is None]
        every = [0.0, *(seconds for seconds in known if seconds is not None), *(each.seconds for each in left)]
        within = max((each.within for each in left), default=1.0)
        starts = min(slots, len(configs)) if shares_processes else len(configs)
        seconds = max((sum(every) + START * starts) / slots, max(every) + START * min(starts, 1))
        return Time(seconds, len(left), within)

    def _reckoned(self, config: RunConfig) -> Time:
        """Look a run up in the table. Runs that differ in objective or seed are looked up once."""
        kind = json.dumps([kind_of(config), config.train.epochs, config.train.steps], sort_keys=True, default=str)
        if kind not in self._table:
            self._table[kind] = reckon(config)
        return self._table[kind]


@dataclass(frozen=True)
class SeedsLine:
    """Seeds of each row that show `difference` (`words`) in a column, with the spread assumed and its source."""

    column: str
    difference: float | None
    words: str
    std: float | None
    source: str
    seeds: int | None
    detectable: float | None = None  # the smallest difference that the planned seeds show, as in a report


@dataclass(frozen=True)
class Fault:
    message: str
    cells: tuple[CellEntry, ...]

    def __str__(self) -> str:
        first, more = self.cells[0], len(self.cells) - 1
        others = f" and {counted(more, 'more cell')}" if more else ""
        return f"row {first.row!r}, column {first.column!r}, seed {first.seed}{others}: {self.message}"


@dataclass(frozen=True)
class Plan:
    """The plan of a suite: runs, time, and seeds at the level of Holm's first step among all its `tests`."""

    jobs: int
    cells: int
    finished: int
    time: Time
    slots: int
    tests: int
    seeds: tuple[SeedsLine, ...]


def faults(jobs: Sequence[Job], processes: int) -> tuple[Fault, ...]:
    """Return the jobs that cannot be built, with the reason. Builds encoder and objective without data or memory."""
    found = []
    for job in jobs:
        try:
            construct(job.config, processes)
        except DipoleError as error:
            found.append((" ".join(str(error).split()), job))
    return _by_message(found)


def missing_data(jobs: Sequence[Job]) -> tuple[Fault, ...]:
    """Return the jobs whose data are not there, with the fix. The network is not asked."""
    asked: dict[str, Sequence[str]] = {}
    for job in jobs:
        if (key := repr(job.config.settings)) not in asked:
            asked[key] = adapter_class(job.config.domain).missing_data(job.config.settings)
    return _by_message((problem, job) for job in jobs for problem in asked[repr(job.config.settings)])


def unknown_metrics(names: Iterable[str], records: Iterable[RunRecord]) -> list[str]:
    """Return a warning for each name of a number that no finished or shipped run has and no suite asks for."""
    known = {name for record in records for name in numbers(record)}
    if known.issuperset(names):
        return []
    for name in suites():
        with suppress(ConfigError):  # that of another package is broken: `dipole list suites` says so
            suite = read_suite(name)
            known |= {column.metric_of(row) for scale in suite.scale for row, column, _ in suite.at(scale).cells()}
    if not known.issuperset(names):  # reading all shipped runs takes a second
        known.update(*map(numbers, known_runs([SHIPPED]).values()))
    return [
        f"warning: no shipped or finished run has the number {name!r}.{nearest(name, known)}"
        for name in names
        if name not in known
    ]


def _by_message(found: Iterable[tuple[str, Job]]) -> tuple[Fault, ...]:
    cells: dict[str, list[CellEntry]] = defaultdict(list)
    for message, job in found:
        cells[message].extend(job.cells)
    return tuple(Fault(message, tuple(of)) for message, of in cells.items())


def make_plan(
    sized: Sized, jobs: Sequence[Job], records: Mapping[str, RunRecord], slots: int, effect: float | None
) -> Plan:
    """Plan a suite: `records` are the finished runs, `effect` replaces the differences of `ColumnEntry.effect`."""
    missing = [job.config for job in jobs if job.hash not in records]
    time = Estimator(records.values()).total(missing, slots, sized.scale.shared_process)
    results = SuiteResults(sized.manifest(jobs), records)
    tests = max(1, results.planned_tests)
    lines = tuple(_seeds_line(results, column, tests, len(sized.seeds), effect) for column in results.manifest.columns)
    return Plan(len(jobs), sum(1 for _ in sized.cells()), len(jobs) - len(missing), time, slots, tests, lines)


def _seeds_line(
    results: SuiteResults, column: ColumnEntry, tests: int, planned: int, effect: float | None
) -> SeedsLine:
    means = [cell.summary.mean for cell in results.cells_of(column.name) if cell.summary is not None]
    means = means or [cell.mean for cell in _printed(results, column) if cell.mean is not None]
    difference, words = column.effect(median(means or [nan]))
    if effect is not None:
        difference, words = effect, f"{effect:g}"
    shown = None if isnan(difference) else difference
    std, source, is_paired = _known_spread(results, column)
    if isnan(std):
        return SeedsLine(column.name, shown, words, None, "no spread known yet: run two seeds first", None)
    if std == 0:
        return SeedsLine(column.name, shown, words, None, f"{source} gave the same", None)
    alpha, least = LEVEL / tests, None
    if planned > 1:
        least = detectable(std, planned, alpha=alpha, is_paired=is_paired)
    seeds = seeds_needed(difference, std, alpha=alpha, is_paired=is_paired)
    return SeedsLine(column.name, shown, words, std, source, seeds, least)


def _printed(results: SuiteResults, column: ColumnEntry) -> list[PrintedCell]:
    return [row.cells[column.name] for row in getattr(results.table, "rows", ()) if column.name in row.cells]


def _known_spread(results: SuiteResults, column: ColumnEntry) -> tuple[float, str, bool]:
    """Return the spread of a column, where it is from, and whether it is that of differences by seed. nan: unknown."""
    cells = results.cells_of(column.name)
    tests = [cell.against_base for cell in cells if cell.against_base is not None]
    if pairs := [test for test in tests if test.spread > 0 and test.method != "Welch"]:
        source = f"{counted(sum(test.n for test in pairs), 'pair')} of earlier runs"
        return median(test.spread for test in pairs), source, True
    if known := [cell.summary for cell in cells if cell.summary is not None and cell.summary.n > 1]:
        source = counted(sum(each.n for each in known), "earlier run")
        return _root_mean_square(each.std for each in known), source, False
    printed = [cell.std for cell in _printed(results, column) if cell.std is not None]
    if any(printed):
        return _root_mean_square(printed), "the paper's spread", False
    return nan, "", False


def _root_mean_square(values: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square(list(values)))))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return keys of similar runs, narrow to wide: same settings, any objective, same domain and length."""
    rest = {
        key: value for key, value in flat(config) if value is not None and key not in ("name", "description", "seed")
    }
    narrow = json.dumps(rest, sort_keys=True)
    any_objective = json.dumps({key: value for key, value in rest.items() if key != "objective"}, sort_keys=True)
    wide = json.dumps([rest.get(key) for key in ("domain", "train.epochs", "train.steps", "train.batch_size")])
    return [f"same:{narrow}", f"objective:{any_objective}", f"length:{wide}"]
