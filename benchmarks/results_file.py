"""Results files: the records of a suite as lines of text, small enough to be committed, and all that a report reads.

    {"dipole": "results", "schema_version": 1, "suite": {...}}      the suite as it was expanded, without its jobs
    {"part": "0c1d...", "value": {...}}                             what many records share: settings, machine, data
    {"run": "4a00b63bd773", "cells": [[0, 0, 0]], ..., "record": {...}, "curves": [...]}      a job, and its record

One line is one run, in the order of the suite's cells, so that a further seed is a further line. A job without a record
is not finished. Every number of a record is stored unchanged. Of metrics.jsonl the file has the curves that the
suite's pictures show, thinned as in a report.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dipole.benchmarks.manifest import CellEntry, JobEntry, Manifest
from dipole.benchmarks.report.curves import Curve
from dipole.benchmarks.suite import CHANGED, Sized
from dipole.core.record import Part, RunRecord, schema_problem
from dipole.core.record.additions import AddedResult
from dipole.core.train.identity import digest
from dipole.core.utils.errors import DataError, ReceivedError, RecordError
from dipole.core.utils.files import atomic_write, is_file, why
from dipole.core.utils.received import parse_json, read_lines

SUFFIX = ".jsonl"
VERSION = 1
SHIPPED = Path(__file__).parent / "results" / "suites"
"""The results that come with dipole."""
SHIPPED_NAME = "shipped"
"""Their name on the command line."""
SHARED = ("config", "versions", "hardware", "seeds", "data")
"""Fields of a record that many have in common: a line of their own holds each once."""
OWN = ("name", "objective", "seed")
"""Fields that a configuration repeats of its record."""
BETWEEN = re.compile(r", (?=[\w-]+(?:\.[\w-]+)+=)")
"""Between two settings that a suite was changed by."""
Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class StoredRun:
    """A finished run without its folder: the record as it was measured, and what lies beside it.

    Args:
        record: without `identity`, which follows from its settings.
        curves: by the names of metrics.jsonl.
        measured: what another program measured later.
        points: what points.json holds.
    """

    record: RunRecord
    curves: Mapping[str, Curve] = field(default_factory=dict)
    measured: Mapping[str, AddedResult] = field(default_factory=dict)
    points: Any = None

    @property
    def whole(self) -> RunRecord:
        """The record with the numbers that were added to its results."""
        added = {name: each.value for name, each in self.measured.items()}
        return self.record.model_copy(update={"results": added | self.record.results}) if added else self.record


@dataclass(frozen=True)
class StoredSuite:
    """A results file: a suite as it was expanded, and its finished runs by name."""

    manifest: Manifest
    runs: Mapping[str, StoredRun]


class _Head(Part):
    dipole: Literal["results"]
    schema_version: Literal[1] = 1
    suite: dict[str, Any]


class _Shared(Part):
    part: str
    value: dict[str, Any]


class _Curves(Part):
    steps: list[float]
    values: dict[str, list[float]]


class _Run(Part):
    run: str
    cells: list[tuple[Index, Index, int]] = Field(min_length=1)
    command: list[str]
    processes: int = 1
    record: dict[str, Any] | None = None
    curves: list[_Curves] = Field(default_factory=list)
    measured: dict[str, AddedResult] = Field(default_factory=dict)
    points: Any = None


def read_results_file(path: Path) -> StoredSuite:
    """Read a results file as a whole.

    Raises:
        RecordError: it cannot be read, is none, is of a newer version, or a line of it is damaged (the line is named).
    """
    head: _Head | None = None
    shared: dict[str, dict[str, Any]] = {}
    runs: list[_Run] = []
    try:
        for number, raw in enumerate(read_lines(path), 1):
            try:
                line = parse_json(raw)
                if number == 1:
                    head = _Head.model_validate(line)
                elif isinstance(line, dict) and "part" in line:
                    part = _Shared.model_validate(line)
                    shared[part.part] = part.value
                else:
                    runs.append(_Run.model_validate(line))
            except ValidationError as error:
                said = schema_problem(error, VERSION)
                raise RecordError(f"{path}, line {number}, is no line of a results file: it {said}") from error
            except ValueError as error:
                raise RecordError(f"{path}, line {number}, is damaged: {error}") from error
    except ReceivedError as error:
        raise RecordError(f"the results file {error}") from error
    if head is None:
        raise RecordError(f"{path} is empty. A results file is what `dipole results add` writes.")
    try:
        return _whole(head, shared, runs)
    except ValidationError as error:
        raise RecordError(f"the results file {path} {schema_problem(error, VERSION)}") from error
    except (ValueError, LookupError) as error:
        raise RecordError(f"the results file {path} does not hold together: {error}") from error


def _whole(head: _Head, shared: Mapping[str, dict[str, Any]], runs: list[_Run]) -> StoredSuite:
    if len({line.run for line in runs}) < len(runs):
        raise ValueError("a run stands in it twice")
    # Rows and columns are known by their numbers: the jobs are read once these are.
    suite = Manifest.model_validate(head.suite | {"jobs": []})
    jobs = []
    for line in runs:
        if odd := [c for c in line.cells if c[0] >= len(suite.rows) or c[1] >= len(suite.columns)]:
            raise ValueError(f"run {line.run} fills row {odd[0][0]}, column {odd[0][1]}, which the suite lacks")
        cells = [CellEntry(row=suite.rows[r].label, column=suite.columns[c].name, seed=s) for r, c, s in line.cells]
        jobs.append(JobEntry(hash=line.run, command=line.command, processes=line.processes, cells=cells))
    kept = {line.run: _run(line, shared) for line in runs if line.record is not None}
    return StoredSuite(suite.model_copy(update={"jobs": jobs}), kept)


def _run(line: _Run, shared: Mapping[str, dict[str, Any]]) -> StoredRun:
    def part(name: Any) -> dict[str, Any]:
        if not isinstance(name, str) or name not in shared:
            raise ValueError(f"the part {str(name)[:40]!r} of run {line.run[:40]} is missing")
        return shared[name]

    values: dict[str, Any] = dict(line.record or {})
    for name in SHARED:
        values[name] = part(values.get(name))
    values["config"] = {**{name: values.get(name) for name in OWN}, **values["config"]}
    if isinstance(histogram := values.get("histogram"), dict):
        values["histogram"] = histogram | {"edges": part(histogram.get("edges")).get("edges")}
    record = RunRecord.model_validate({"hash": line.run, **values})
    curves: dict[str, Curve] = {}
    for group in line.curves:
        if odd := [name for name, found in group.values.items() if len(found) != len(group.steps)]:
            raise ValueError(f"the curve {odd[0]!r} of run {line.run} has not a value for each step")
        curves |= {name: Curve(tuple(group.steps), tuple(found)) for name, found in group.values.items()}
    return StoredRun(record, curves, line.measured, line.points)


def results_files(place: Path) -> list[Path]:
    """The results files of a place: itself, or those in a folder."""
    return [place] if is_file(place) else sorted(path for path in place.glob(f"*{SUFFIX}") if is_file(path))


def some_files(place: Path) -> list[Path]:
    """The results files of a place that has to hold some.

    Raises:
        DataError: it is no results file and has none in it.
    """
    if paths := results_files(place):
        return paths
    raise DataError(f"no results file {place}, and none in it. `dipole results add RUNS --to DIR` writes some.")


def known_runs(places: Iterable[Path]) -> dict[str, RunRecord]:
    """The finished runs of results files.

    Raises:
        DataError: a place is no results file and has none in it.
        RecordError: one is damaged.
    """
    found: dict[str, RunRecord] = {}
    for place in places:
        for path in some_files(place):
            found |= {
                name: run.whole for name, run in read_results_file(path).runs.items() if run.record.status == "done"
            }
    return found


def shipped_runs(sized: Sized) -> set[str]:
    """The runs of a suite that come with dipole, none if its file is missing or another version's."""
    try:
        return set(read_results_file(SHIPPED / f"{sized.suite.name}-{sized.name}{SUFFIX}").runs)
    except RecordError:
        return set()


def stored_overrides(places: Iterable[Path]) -> dict[tuple[str, str], list[str]]:
    """Return the settings (`--set`) by which suites of results files were changed: (suite, scale) -> texts.

    Raises:
        DataError: a place is no results file and has none in it.
        RecordError: one is damaged.
    """
    found = {}
    for place in places:
        for path in some_files(place):
            suite = read_results_file(path).manifest
            if changed := suite.protocol.get(CHANGED):
                found[suite.suite, suite.scale] = BETWEEN.split(str(changed))
    return found


def write_results_file(path: Path, suite: StoredSuite) -> None:
    """Write a results file whole, or leave what is there.

    Raises:
        RecordError: the disk refused. What is there stays as it is.
    """
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in _lines(suite))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {why(error, '--to')}") from error


def _lines(suite: StoredSuite) -> Iterator[dict[str, Any]]:
    manifest = suite.manifest
    rows = {row.label: number for number, row in enumerate(manifest.rows)}
    columns = {column.name: number for number, column in enumerate(manifest.columns)}
    shared: dict[str, Any] = {}
    runs = []
    for job in manifest.jobs:
        line: dict[str, Any] = {
            "run": job.hash,
            "cells": sorted([rows[c.row], columns[c.column], c.seed] for c in job.cells),
            "command": job.command,
        }
        if job.processes != 1:
            line["processes"] = job.processes
        if (kept := suite.runs.get(job.hash)) is not None:
            line |= _line(kept, shared)
        runs.append(line)
    yield {"dipole": "results", "schema_version": VERSION, "suite": manifest.model_dump(mode="json", exclude={"jobs"})}
    yield from ({"part": name, "value": shared[name]} for name in sorted(shared))
    yield from sorted(runs, key=lambda line: line["cells"])


def _line(kept: StoredRun, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a finished run. Its shared parts are added to `shared`."""

    def part(value: dict[str, Any]) -> str:
        name = digest(value)
        shared[name] = value
        return name

    record = kept.record
    values = record.model_dump(mode="json", exclude_defaults=True, exclude={"hash", "identity"})
    values["config"] = {k: v for k, v in record.config.items() if k not in OWN or v != values[k]}
    for name in SHARED:
        values[name] = part(values[name])
    if (histogram := values.get("histogram")) is not None:
        counts = {name: list(map(_short, found)) for name, found in histogram.items() if name != "edges" and found}
        values["histogram"] = {"edges": part({"edges": histogram["edges"]}), **counts}
    line: dict[str, Any] = {"record": values}
    by_steps = sorted(kept.curves.items(), key=lambda item: (item[1].steps, item[0]))
    if groups := [(steps, list(each)) for steps, each in groupby(by_steps, key=lambda item: item[1].steps)]:
        line["curves"] = [
            {"steps": list(map(_short, steps)), "values": {name: list(map(_short, c.values)) for name, c in each}}
            for steps, each in groups
        ]
    if kept.measured:
        line["measured"] = {name: result.model_dump() for name, result in kept.measured.items()}
    return line | ({} if kept.points is None else {"points": kept.points})


def _short(value: float) -> float:
    """The same number in fewer letters."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def merged(one: StoredSuite, other: StoredSuite, replaces: bool = False) -> tuple[StoredSuite, list[str], list[str]]:
    """Both together: all jobs, all runs. Then, a sentence each, what they disagree about, where `one` is believed, and
    what of `other` is left out.

    Where the suite itself is another now, or a run has other results, that of `other` is taken if it `replaces`. A run
    on other data than those beside it is never taken.
    """
    conflicts, runs = [], dict(one.runs)
    mine, theirs = one.manifest, other.manifest
    if without_jobs(mine) != without_jobs(theirs):
        changed = [
            name for name in Manifest.model_fields if name != "jobs" and getattr(mine, name) != getattr(theirs, name)
        ]
        conflicts.append(f"the suite {mine.name} is not the same in both: {', '.join(changed)}")
        if not replaces:
            return one, conflicts, []
        jobs = {job.hash: job for job in theirs.jobs}
        runs = {name: run for name, run in runs.items() if name in jobs}
    else:
        jobs = {job.hash: job for job in (*mine.jobs, *theirs.jobs)}
    new = [run.record for name, run in other.runs.items() if name not in runs]
    foreign = strangers([run.record for run in runs.values()], new) if new else {}
    left = [f"run {name} of {mine.name} {why}; keep it in another folder" for name, why in foreign.items()]
    for name, run in other.runs.items():
        if name in foreign:
            continue
        if name in runs and (odd := differing(runs[name].record, run.record)):
            conflicts.append(f"run {name} of {mine.name} has other results: {odd}")
            runs[name] = run if replaces else runs[name]
        elif name in runs:
            runs[name] = replace(runs[name], measured={**run.measured, **runs[name].measured})
        else:
            runs[name] = run
    both = (theirs if replaces else mine).model_copy(update={"jobs": list(jobs.values())})
    return StoredSuite(both, runs), conflicts, left


def without_jobs(manifest: Manifest) -> Manifest:
    """Return the suite without its runs."""
    return manifest.model_copy(update={"jobs": []})


def differing(one: RunRecord, other: RunRecord) -> str:
    """The first result or diagnostic that two records of one run have otherwise, and from which machines."""
    for name in ("results", "diagnostics"):
        mine, theirs = getattr(one, name), getattr(other, name)
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                machines = one.hardware.device_name, other.hardware.device_name
                return f"{key} is {mine.get(key)} ({machines[0]}) and {theirs.get(key)} ({machines[1]})"
    return ""


def strangers(known: Iterable[RunRecord], more: Iterable[RunRecord] = ()) -> dict[str, str]:
    """Runs of `more` whose data are not those of `known`, or of `known` alone those of the smaller part: run -> why.

    Data of one name and size are the same for every run of a seed. Where they do not depend on the seed, as several of
    `known` show, they are the same for every seed.
    """
    trusted, newer = list(known), list(more)
    by_seed: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in trusted:
        by_seed[_name(record), record.seed][_fingerprint(record)].append(record.hash)
    found: dict[str, str] = {}
    of_name: dict[str, list[str]] = defaultdict(list)
    for (name, _), prints in by_seed.items():
        usual = max(prints, key=lambda each: len(prints[each]))
        of_name[name].append(usual)
        for odd in prints.keys() - {usual}:
            found |= dict.fromkeys(prints[odd], _why(odd, usual))
    if not newer:
        return found
    found = {}
    for record in newer:
        name, own = _name(record), _fingerprint(record)
        seeds = of_name.get(name, [])
        if of_seed := by_seed.get((name, record.seed)):
            wanted = next(iter(of_seed))
        elif len(seeds) > 1 and len(set(seeds)) == 1:
            wanted = seeds[0]
        else:
            continue
        if own != wanted:
            found[record.hash] = _why(own, wanted)
    return found


def _name(record: RunRecord) -> str:
    return json.dumps([record.domain, record.data.get("name"), record.data.get("sizes")], sort_keys=True, default=str)


def _fingerprint(record: RunRecord) -> str:
    return str(record.data.get("fingerprint"))


def _why(own: str, other: str) -> str:
    return f"was measured on other data (fingerprint {own[:12]}) than the runs beside it ({other[:12]})"
