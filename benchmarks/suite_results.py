"""From the records of runs to filled suites: cells with spread, tests against the base, printed values, and claims.

`gather` reads folders of runs and results files. `SuiteResults` fills the cells of a suite with their numbers, and is
the table on which a paper's claims are judged (`claims/judge.py`).
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, median

from dipole.benchmarks import results_file
from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import JudgedClaim, judge_claims
from dipole.benchmarks.claims.protocol import protocol_differences
from dipole.benchmarks.claims.verdicts import PrintedComparison, as_family, compare_printed
from dipole.benchmarks.manifest import ColumnEntry, Manifest, Problem, Records, RowEntry, read_manifests, read_records
from dipole.benchmarks.results_file import RunFiles, StoredRun
from dipole.benchmarks.statistics import LEVEL, PairedTest, Summary, difference, holm, summarize
from dipole.benchmarks.statistics.power import detectable_by
from dipole.benchmarks.suite import marked
from dipole.core.record import RunRecord
from dipole.core.utils.errors import ConfigError, RecordError
from dipole.core.utils.files import is_file, is_folder
from dipole.core.utils.text import counted

Samples = Mapping[int, float]  # values by seed


@dataclass(frozen=True)
class Gathered(Records):
    """What a report reads. Problems are also results that contradict each other."""

    files: RunFiles = field(default_factory=RunFiles)
    manifests: list[Manifest] = field(default_factory=list)

    @property
    def suites(self) -> list["SuiteResults"]:
        return [SuiteResults(manifest, self.records) for manifest in self.manifests]

    def read_folder(self, place: Path) -> None:
        of_folder = read_records(place)
        manifests, unreadable = read_manifests(place)
        self.problems.extend([*of_folder.problems, *unreadable])
        for name, record in of_folder.records.items():
            self._add_run(place / name, record)
        for manifest in manifests:
            self._add_suite(place, manifest)

    def read_file(self, path: Path) -> None:
        try:
            suite = results_file.read_results_file(path)
        except RecordError as error:
            self.problems.append(Problem(path, str(error)))
            return
        for run in suite.runs.values():
            self._add_run(path, run.whole, run)
        self._add_suite(path, suite.manifest)

    def _add_suite(self, path: Path, manifest: Manifest) -> None:
        known = next((each for each in self.manifests if each.name == manifest.name), manifest)
        both, conflicts = results_file.merged_manifests(known, manifest)
        self.problems.extend(Problem(path, said, manifest.name) for said in conflicts)
        self.manifests[:] = [each for each in self.manifests if each is not known] + [both]

    def _add_run(self, path: Path, record: RunRecord, run: StoredRun | None = None) -> None:
        name, records, stored = record.hash, self.records, self.files.stored
        old = records.get(name)
        if old is None or (old.status != "done" and record.status == "done"):
            records[name] = record
            self.files.folders.pop(name, None)
            if run is None:
                self.files.folders[name] = path
            else:
                stored[name] = run
        elif record.status == "done" and (odd := results_file.differing(old, record)):
            said = f"run {name}: other results than the same run elsewhere, which are used: {odd}"
            self.problems.append(Problem(path, said, name))
        if run is not None and (one := stored.get(name)):
            points = run.points if one.points is None else one.points
            stored[name] = StoredRun(one.record, run.curves | one.curves, run.measured | one.measured, points)


def gather(places: Iterable[Path]) -> Gathered:
    """Return the runs of folders and results files, each read once. Of two runs of a name the first finished counts.

    Raise ConfigError if a place is neither, or is a single run.
    """
    places = list({place.resolve(): place for place in places}.values())
    found = Gathered(files=RunFiles(folder=places[0]))
    for place in places:
        if is_file(place / "record.json"):
            raise ConfigError(
                f"{place} is one run. Give its parent folder, {place.parent}. `dipole compare` compares two runs."
            )
        if is_folder(place):
            found.read_folder(place)
        elif not is_file(place):
            raise ConfigError(
                f"no runs folder {place}, and no results file. Give what `dipole train`, `dipole bench` or "
                "`dipole results` wrote."
            )
        for path in results_file.results_files(place):
            found.read_file(path)
    found.manifests[:] = map(marked, sorted(found.manifests, key=lambda each: each.name))
    done = found.done
    for manifest in found.manifests:
        for name, why in results_file.strangers(done[job.hash] for job in manifest.jobs if job.hash in done).items():
            found.problems.append(Problem(places[0], f"{manifest.name}: run {name} {why}", "data"))
    return found


def numbers(record: RunRecord) -> dict[str, float | None]:
    """Return the numbers of a record by name: results, diagnostics (`diag/...`) and costs (`cost/...`)."""
    seconds = record.training_seconds
    if seconds is None:  # studies do not time training by itself
        seconds = record.wall_seconds
    return {
        **record.results,
        **{f"diag/{name}": value for name, value in record.diagnostics.items()},
        "cost/wall_seconds": record.wall_seconds,
        "cost/seconds_per_step": seconds / record.steps if record.steps else None,
        "cost/peak_memory_bytes": record.peak_memory_bytes,
        "cost/peak_device_bytes": record.peak_device_bytes,
    }


@dataclass(frozen=True)
class CellResult:
    """One cell of a suite: our sample, the test against the base, and the paper's number."""

    row: RowEntry
    column: ColumnEntry
    samples: Samples
    wanted: int  # runs that the suite asks for
    summary: Summary | None
    against_base: PairedTest | None
    p_holm: float  # of the test among the `family` of all different tests of the suite
    comparison: PrintedComparison | None
    printed: published.PrintedCell | None
    has_failed: bool = False
    family: int = 1
    is_repeated: bool = False  # an earlier cell has the test: columns may share runs and metric

    @property
    def base(self) -> str:
        return self.row.base or self.column.base or ""

    @property
    def why_not_significant(self) -> str:
        """Why a difference is not significant although its interval excludes 0, or ""."""
        test = self.against_base
        if test is None or not (test.low > 0 or test.high < 0) or self.p_holm < LEVEL:
            return ""
        if not isfinite(self.p_holm):
            return "not tested"
        return f"not significant by Holm over {counted(self.family, 'test')}"

    @property
    def detectable(self) -> float:
        """Smallest difference from the base that its seeds show with 80 % power, at the first step of Holm's test."""
        test = self.against_base
        if test is None:
            return nan
        return detectable_by(test, LEVEL / self.family)


def curves_on(records: Iterable[RunRecord]) -> str:
    """Return the part of the data on which runs measured their learning curves."""
    return " and ".join(sorted({record.curves_on or record.evaluated_on for record in records})) or "test"


class SuiteResults:
    """A suite's cells filled from the records of its runs. Also the table on which a paper's claims are evaluated."""

    def __init__(self, manifest: Manifest, records: Mapping[str, RunRecord]) -> None:
        self.manifest, self.jobs, self.rows = manifest, manifest.jobs, manifest.rows
        self.columns = tuple(column.name for column in manifest.columns)
        self.base = next((row.base for row in self.rows if row.base), None)  # the row that others are tested against
        self.table = published.tables().get(manifest.published or "")  # that the suite reproduces
        self.records = {job.hash: records[job.hash] for job in manifest.jobs if job.hash in records}
        self._hashes: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        self._samples: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
        factors = {column.name: column.factor for column in manifest.columns}
        self._metrics = {(row.label, c.name): c.metric_of(row) for row in manifest.rows for c in manifest.columns}
        for job in manifest.jobs:
            record, known = self.records.get(job.hash), {}
            if record is not None:
                known = numbers(record)
            for cell in job.cells:
                place, factor = (cell.row, cell.column), factors[cell.column]
                self._hashes[place][cell.seed] = job.hash
                values = {"untrained": known.get(f"untrained/{self._metrics[place]}")}
                if record is not None and record.status == "done":
                    values["mean"] = known.get(self._metrics[place])
                for name, value in values.items():
                    if value is not None and isfinite(value * factor):
                        self._samples[*place, name][cell.seed] = value * factor

    def value(self, row: str, column: str, field: str = "mean") -> float | None:
        """Return the mean over the seeds of a cell, or None if nothing was run. For the fields see `samples`."""
        samples = self.samples(row, column, field)
        return fmean(samples.values()) if samples else None

    def samples(self, row: str, column: str, field: str = "mean") -> Samples | None:
        """Return values by seed: "mean", "untrained", or "drop", the loss against the balanced column or group."""
        label, is_ours = row, any(each.label == row for each in self.rows)
        if self.table is not None and not is_ours and (printed := self.table.find(row)) is not None:
            label = printed.label  # of a method with a single row
        if field != "drop":
            return self._samples.get((label, column, field))
        found = self._samples.get((label, column, "mean"), {})
        balanced = self._samples.get((*_balanced(label, column), "mean"), {})
        return {seed: balanced[seed] - value for seed, value in found.items() if seed in balanced} or None

    def runs_of(self, row: str, column: str) -> list[RunRecord]:
        """Return the finished runs of a cell, by seed, or [] without one."""
        hashes = self._hashes.get((row, column), {})
        found = [self.records[hashes[seed]] for seed in sorted(hashes) if hashes[seed] in self.records]
        return [record for record in found if record.status == "done"]

    @cached_property
    def cells(self) -> list[CellResult]:
        """All cells row by row: our numbers, the test against the base, and the printed number."""
        places = product(self.rows, self.manifest.columns)
        found = [self._cell(row, column) for row, column in places if (row.label, column.name) in self._hashes]
        compared = as_family([cell.comparison for cell in found])
        tests = [self._test(cell.row, cell.column) for cell in found]
        p_values = {test: getattr(cell.against_base, "p_t", nan) for test, cell in zip(tests, found, strict=True)}
        family = max(1, sum(map(isfinite, p_values.values())))
        if self.manifest.not_decidable:
            p_values = dict.fromkeys(p_values, nan)
            compared = [each and replace(each, is_decidable=False) for each in compared]
        corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
        first = {test: place for place, test in reversed(list(enumerate(tests)))}
        return [
            replace(cell, p_holm=corrected[test], family=family, comparison=one, is_repeated=first[test] < place)
            for place, (cell, test, one) in enumerate(zip(found, tests, compared, strict=True))
        ]

    def _test(self, row: RowEntry, column: ColumnEntry) -> tuple[Hashable, ...] | None:
        """Return what makes a cell's test another than those of other cells: runs and metric of both sides."""
        places = (row.label, column.name), base_of(row, column)
        if places[0] == places[1] or not all(place in self._hashes for place in places):
            return None
        return tuple((frozenset(self._hashes[place].values()), self._metrics[place]) for place in places)

    @property
    def planned_tests(self) -> int:
        tests = {self._test(row, column) for row in self.rows for column in self.manifest.columns}
        return len(tests - {None})

    def _cell(self, row: RowEntry, column: ColumnEntry) -> CellResult:
        """Fill a cell, without correction for several tests and comparisons."""
        samples = self._samples.get((row.label, column.name, "mean"), {})
        hashes = self._hashes[row.label, column.name].values()
        failed = any(self.records[name].status == "failed" for name in hashes if name in self.records)
        summary, printed, comparison = None, None, None
        if samples:
            summary = summarize(list(samples.values()))
        if self.table is not None and (own := self.table.find(row.label)) is not None:
            printed = own.cells.get(column.name)
            if printed is not None and summary is not None:
                is_same = self.manifest.is_paper_protocol
                comparison = compare_printed(printed, self.table.trials, summary, self.table.metric, is_same)
        place, test = base_of(row, column), None
        base = self._samples.get((*place, "mean"))
        if samples and base and place != (row.label, column.name):
            test = difference(base, samples)
        return CellResult(row, column, samples, len(hashes), summary, test, nan, comparison, printed, failed)

    @property
    def tested(self) -> list[CellResult]:
        """The cells whose difference from the base is tested, each test once."""
        return [cell for cell in self.cells if isfinite(cell.p_holm) and not cell.is_repeated]

    def cell(self, row: str, column: str) -> CellResult | None:
        return self._by_place.get((row, column))

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str], CellResult]:
        return {(cell.row.label, cell.column.name): cell for cell in self.cells}

    def detectable(self, column: str) -> float:
        """Return the smallest difference that half of the tests of a column can show, or nan without a test."""
        known = [cell.detectable for cell in self.cells_of(column) if isfinite(cell.detectable)]
        return median(known) if known else nan

    def cells_of(self, column: str) -> list[CellResult]:
        return [cell for cell in self.cells if cell.column.name == column]

    def claims(self, others: Iterable["SuiteResults"] = ()) -> list[JudgedClaim]:
        """Judge the paper's claims about this suite's table, those on several tables also on `others` of this scale."""
        if self.table is None:
            return []
        same_scale = [other for other in others if other.manifest.scale == self.manifest.scale]
        # A suite that cannot decide anything is no evidence for the claims of another.
        same_scale = [other for other in same_scale if self.manifest.not_decidable or not other.manifest.not_decidable]
        tables = {s.table.id: s for s in (*same_scale, self) if s.table is not None}
        by_protocol = {name for name, suite in tables.items() if suite.manifest.is_paper_protocol}
        claims = [claim for claim in published.claims_of(self.table.paper) if self.table.id in claim.tables]
        return judge_claims(claims, tables, by_protocol, self.manifest.not_decidable)

    @cached_property
    def run_groups(self) -> Mapping[str, str]:
        """Column -> the first column of its group. Columns that share runs are one group."""
        first = {column: column for column in self.columns}
        for job in self.jobs:
            for one, other in pairwise(dict.fromkeys(cell.column for cell in job.cells)):
                gone, kept = first[other], first[one]
                first |= {column: kept for column, name in first.items() if name == gone}
        return first

    @property
    def protocol_notes(self) -> list[str]:
        return protocol_differences(getattr(self.table, "protocol", {}), self.manifest.protocol)


def base_of(row: RowEntry, column: ColumnEntry) -> tuple[str, str]:
    """Return row and column of the cell that a cell is tested against: the row's base, or else the column's."""
    if row.base:
        return row.base, column.name
    return row.label, column.base or ""


def _balanced(row: str, column: str) -> tuple[str, str]:
    """Return the cell of balanced data: CACR Table 2 has it as a column, Table 4 as a group."""
    kind, slash, rest = column.partition("/")
    if slash and kind in ("linear", "exponential"):
        return row, f"regular/{rest}"
    method, separator, _ = row.partition(" / ")
    if separator:
        row = f"{method} / ImageNet-1K"
    return row, column
