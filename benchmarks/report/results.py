"""Records of a suite as numbers: cells with spread, tests against the base, printed values beside them."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite, nan
from statistics import fmean, median

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import Claimed, judged_claims
from dipole.benchmarks.claims.printed import Comparison, among, compare, protocol_differences
from dipole.benchmarks.claims.verdicts import NOT_DECIDABLE
from dipole.benchmarks.manifest import ColumnEntry, JobEntry, Manifest, RowEntry
from dipole.benchmarks.report.ranking import LEVEL, Rank, Samples, rank_objectives
from dipole.benchmarks.statistics import PairedTest, Summary, detectable, difference, holm, summarize
from dipole.core.record import RunRecord
from dipole.core.utils.errors import nearest
from dipole.core.utils.text import counted


def measure(record: RunRecord, metric: str) -> float | None:
    """Return a number of a record by name: a result, a diagnostic (`diag/...`) or a cost (`cost/...`)."""
    kind, _, name = metric.partition("/")
    if kind == "diag":
        return record.diagnostics.get(name)
    if kind == "cost":
        return _cost(record).get(name)
    return record.results.get(metric)


def metrics(record: RunRecord) -> list[str]:
    """Return every name that `measure` knows for a record."""
    return [*record.results, *(f"diag/{name}" for name in record.diagnostics), *(f"cost/{n}" for n in _cost(record))]


def _cost(record: RunRecord) -> dict[str, float | None]:
    seconds = record.training_seconds
    if seconds is None:  # studies do not time training by itself
        seconds = record.wall_seconds
    return {
        "wall_seconds": record.wall_seconds,
        "seconds_per_step": seconds / record.steps if record.steps else None,
        "peak_memory_bytes": record.peak_memory_bytes,
        "peak_device_bytes": record.peak_device_bytes,
    }


@dataclass(frozen=True)
class CellResult:
    """One cell of a suite: our sample, the test against the base, and the paper's number.

    Without a sample there is no summary, without a printed number no comparison. `p_holm` is the p-value of the test
    among the `family` of all different tests of the suite, `wanted` the number of runs that the suite asks for. A test
    `is_repeated` if an earlier cell has it: columns may share runs and metric, and a test counts once.
    """

    row: RowEntry
    column: ColumnEntry
    samples: Samples
    wanted: int
    summary: Summary | None
    against_base: PairedTest | None
    p_holm: float
    comparison: Comparison | None
    printed: published.PrintedCell | None
    has_failed: bool = False
    family: int = 1
    is_repeated: bool = False

    @property
    def base(self) -> str:
        """The row or column that it is tested against, or ""."""
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
        """Smallest difference from the base that its seeds show with 80 % power, at the first step of Holm's test.

        It is nan without a test or a spread.
        """
        test = self.against_base
        if test is None or not test.spread > 0:
            return nan
        alpha, is_paired = LEVEL / self.family, test.method != "Welch"
        return detectable(test.spread, test.n, alpha=alpha, is_paired=is_paired, other=test.larger)


def curves_on(records: Iterable[RunRecord]) -> str:
    """Return the part of the data on which runs measured their learning curves."""
    return " and ".join(sorted({record.curves_on or record.evaluated_on for record in records})) or "test"


class SuiteResults:
    """A suite's cells filled from the records of its runs. Also the grid on which a paper's claims are evaluated."""

    def __init__(self, manifest: Manifest, records: Mapping[str, RunRecord]) -> None:
        self.manifest = manifest
        self.jobs: Sequence[JobEntry] = manifest.jobs
        self.records = {job.hash: records[job.hash] for job in manifest.jobs if job.hash in records}
        self._by_column = {c.name: c for c in manifest.columns}
        self._metrics = {(r.label, c.name): c.metric_of(r) for r in manifest.rows for c in manifest.columns}
        self._cells: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        self._samples: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        # A report asks for the claims of a suite in several places.
        self._claimed: dict[tuple[SuiteResults, ...], list[Claimed]] = {}
        for job in manifest.jobs:
            record = self.records.get(job.hash)
            for cell in job.cells:
                self._cells[cell.row, cell.column][cell.seed] = job.hash
                column = self._by_column[cell.column]
                value = None
                if record is not None and record.status == "done":
                    value = measure(record, self._metrics[cell.row, cell.column])
                if value is not None and isfinite(value * column.factor):
                    self._samples[cell.row, cell.column][cell.seed] = value * column.factor

    @property
    def table(self) -> published.PrintedTable | None:
        """The printed table that the suite reproduces, or None."""
        return published.tables().get(self.manifest.published or "")

    @property
    def not_decidable(self) -> str:
        """Why the suite cannot decide anything at this scale, or "". Its numbers are shown, and counted nowhere."""
        return self.manifest.not_decidable

    @property
    def rows(self) -> Sequence[RowEntry]:
        """The rows in order."""
        return self.manifest.rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns in order."""
        return tuple(c.name for c in self.manifest.columns)

    def find(self, name: str) -> str | None:
        """Return the label of a row, or None without a single match."""
        labels = [row.label for row in self.rows]
        if name in labels:
            return name
        fits = [label for label in labels if label.partition(" / ")[0] == name]
        if len(fits) == 1:
            return fits[0]
        return None

    def value(self, row: str, column: str, kind: str = "mean") -> float | None:
        """Return the mean over the seeds of a cell, or None if nothing was run. For the kinds see `samples`."""
        samples = self.samples(row, column, kind)
        return fmean(samples.values()) if samples else None

    def samples(self, row: str, column: str, kind: str = "mean") -> Samples | None:
        """Return values by seed, or None if nothing was run.

        A "drop" is the loss against the balanced column or group of the same seed. "untrained" is the number before
        training, if the runs measured it.
        """
        label = self.find(row) or ""
        if kind == "untrained":
            return self._untrained(label, column)
        found = self._samples.get((label, column))
        if found is None or kind == "mean":
            return found
        balanced = self._samples.get(_balanced(label, column), {})
        return {seed: balanced[seed] - value for seed, value in found.items() if seed in balanced} or None

    def _untrained(self, row: str, column: str) -> Samples | None:
        entry, cells = self._by_column.get(column), self._cells.get((row, column))
        of = next((each for each in self.rows if each.label == row), None)
        if entry is None or cells is None or of is None:
            return None
        metric, found = f"untrained/{entry.metric_of(of)}", {}
        for seed, name in cells.items():
            value = measure(self.records[name], metric) if name in self.records else None
            if value is not None:
                found[seed] = value * entry.factor
        return found or None

    def runs_of(self, row: str, column: str) -> list[RunRecord]:
        """Return the finished runs of a cell, by seed, or [] without one."""
        hashes = self._cells.get((row, column), {})
        found = [self.records[hashes[seed]] for seed in sorted(hashes) if hashes[seed] in self.records]
        return [record for record in found if record.status == "done"]

    @property
    def runs_by_row(self) -> dict[str, set[str]]:
        """Hashes of the runs of each row, over all columns and seeds."""
        found: dict[str, set[str]] = defaultdict(set)
        for (row, _), hashes in self._cells.items():
            found[row] |= set(hashes.values())
        return dict(found)

    @cached_property
    def cells(self) -> list[CellResult]:
        """All cells row by row: our numbers, the test against the base, and the printed number."""
        found = [
            self._cell(row, c) for row in self.rows for c in self.manifest.columns if (row.label, c.name) in self._cells
        ]
        beside = among([cell.comparison for cell in found])
        tests = [self._test(cell.row, cell.column) for cell in found]
        p_values = {test: getattr(cell.against_base, "p_t", nan) for test, cell in zip(tests, found, strict=True)}
        family = max(1, sum(map(isfinite, p_values.values())))
        if self.not_decidable:
            p_values = dict.fromkeys(p_values, nan)
            beside = [replace(each, verdict=NOT_DECIDABLE, p=nan) if each else None for each in beside]
        corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
        first = {test: place for place, test in reversed(list(enumerate(tests)))}
        return [
            replace(cell, p_holm=corrected[test], family=family, comparison=one, is_repeated=first[test] < place)
            for place, (cell, test, one) in enumerate(zip(found, tests, beside, strict=True))
        ]

    def _test(self, row: RowEntry, column: ColumnEntry) -> tuple[Hashable, ...] | None:
        """Return what makes a cell's test another than those of other cells: runs and metric of both sides."""
        places = (row.label, column.name), base_of(row, column)
        if places[0] == places[1] or not all(place in self._cells for place in places):
            return None
        return tuple((frozenset(self._cells[place].values()), self._metrics[place]) for place in places)

    @property
    def planned_tests(self) -> int:
        """How many different tests there are once all runs are finished."""
        tests = {self._test(row, column) for row in self.rows for column in self.manifest.columns}
        return len(tests - {None})

    def _cell(self, row: RowEntry, column: ColumnEntry) -> CellResult:
        """Fill a cell, without correction for several tests and comparisons."""
        samples = self._samples.get((row.label, column.name), {})
        hashes = self._cells[row.label, column.name].values()
        failed = any(self.records[name].status == "failed" for name in hashes if name in self.records)
        summary, printed, comparison = None, None, None
        if samples:
            summary = summarize(list(samples.values()))
        if self.table is not None and (own := self.table.find(row.label)) is not None:
            printed = own.cells.get(column.name)
            if printed is not None and summary is not None:
                is_same = self.manifest.is_paper_protocol
                comparison = compare(printed, self.table.trials, summary, self.table.metric, is_same)
        test = self._against_base(row, column)
        return CellResult(row, column, samples, len(hashes), summary, test, nan, comparison, printed, failed)

    @property
    def tests(self) -> int:
        """How many different tests against a base there are."""
        return sum(isfinite(cell.p_holm) and not cell.is_repeated for cell in self.cells)

    def cell(self, row: str, column: str) -> CellResult | None:
        """Return a cell, or None if it does not exist."""
        return self._index.get((row, column))

    def detectable(self, column: str) -> float:
        """Return the smallest difference that half of the tests of a column can show, or nan without a test."""
        known = [cell.detectable for cell in self.cells_of(column) if isfinite(cell.detectable)]
        return median(known) if known else nan

    def cells_of(self, column: str) -> list[CellResult]:
        """Return the cells of a column."""
        return [cell for cell in self.cells if cell.column.name == column]

    @cached_property
    def _index(self) -> Mapping[tuple[str, str], CellResult]:
        return {(c.row.label, c.column.name): c for c in self.cells}

    def claims(self, others: Iterable["SuiteResults"] = ()) -> list[Claimed]:
        """Return the claims about this suite's table, on the printed numbers and on ours, or [] without a table."""
        if self.table is None:
            return []
        same_scale = [other for other in others if other.manifest.scale == self.manifest.scale]
        # A suite that cannot decide anything is no evidence for the claims of another.
        same_scale = [other for other in same_scale if self.not_decidable or not other.not_decidable]
        mine = {s.table.id: s for s in (*same_scale, self) if s.table is not None}
        claims = [claim for claim in published.claims_of(self.table.paper) if self.table.id in claim.tables]
        asked = tuple(mine[name] for name in sorted({name for claim in claims for name in claim.tables} & set(mine)))
        if asked not in self._claimed:
            papers = {name for name, suite in mine.items() if suite.manifest.is_paper_protocol}
            self._claimed[asked] = judged_claims(claims, mine, papers, self.not_decidable)
        return list(self._claimed[asked])

    def tasks(self) -> dict[str, dict[str, Samples]]:
        """Return column -> row -> values by seed."""
        return {
            column: {row.label: found for row in self.rows if (found := self.samples(row.label, column))}
            for column in self.columns
        }

    @property
    def base(self) -> str | None:
        """The row that others are tested against. None for a suite without one."""
        return next((row.base for row in self.rows if row.base), None)

    def ranks(self) -> list[Rank]:
        """Return the rows ranked over the columns, best rank of means first. Rows without all columns have no rank."""
        costs = [c.name for c in self.manifest.columns if not c.higher_is_better]
        tasks = {name: rows for name, rows in self.tasks().items() if rows}
        decided: dict[str, list[float]] = defaultdict(list)
        for cell in self.cells:
            if cell.row.base and cell.against_base is not None and cell.p_holm < LEVEL:
                decided[cell.row.label].append(cell.column.sign * cell.against_base.difference)
        ranks = rank_objectives(tasks, self.base, decided, costs, self.run_groups)
        gains = sum(rank.gain is not None and isfinite(rank.gain.p) for rank in ranks)
        return [replace(rank, tests=self.tests + gains) for rank in ranks]

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
    def curves_on(self) -> str:
        """The part of the data on which learning curves were measured."""
        return curves_on(record for record in self.records.values() if record.status == "done")

    @property
    def empty_columns(self) -> list[str]:
        """A line for each column without numbers: a misspelled name, or a probe that was not run."""
        lines = []
        for column in self.manifest.columns:
            finished = [record for row in self.rows for record in self.runs_of(row.label, column.name)]
            if finished and not any(self.samples(row.label, column.name) for row in self.rows):
                known = sorted({name for record in finished for name in metrics(record)})
                asked = list(dict.fromkeys(column.metric_of(row) for row in self.rows))
                lines.append(
                    f"Column {column.name!r} is empty: its finished runs hold no number "
                    f"{' or '.join(map(repr, asked))}.{nearest(asked[0], known)} They hold: {', '.join(known)}."
                )
        return lines

    @property
    def protocol_notes(self) -> list[str]:
        """Differences from the protocol of the paper."""
        return protocol_differences(getattr(self.table, "protocol", {}), self.manifest.protocol)

    def _against_base(self, row: RowEntry, column: ColumnEntry) -> PairedTest | None:
        ours, place = self._samples.get((row.label, column.name)), base_of(row, column)
        base = self._samples.get(place)
        if not ours or not base or place == (row.label, column.name):
            return None
        return difference(base, ours, resolution=self._resolution(row, column, [*ours.values(), *base.values()]))

    def _resolution(self, row: RowEntry, column: ColumnEntry, values: Sequence[float]) -> float | None:
        """Return the smallest step of a column: 1 / n for accuracies on n test points, else 0.01 for percentages."""
        records = self.runs_of(row.label, column.name)
        sizes = records[0].data.get("sizes") if records else None
        points = sizes.get("test") if isinstance(sizes, Mapping) else None
        if isinstance(points, int) and points > 0 and column.metric_of(row).rpartition("/")[2] == "accuracy":
            counts = [value / column.factor * points for value in values]
            if all(abs(count - round(count)) < 1e-6 for count in counts):
                return abs(column.factor) / points
        if column.unit == "%":
            return 0.01
        return None


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
