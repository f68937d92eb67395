"""Results files: a suite and its records as lines of JSON, small enough to be committed. A report needs nothing else.

    {"dipole": "results", "schema_version": 1, "suite": {...}}      the expanded suite, without its jobs
    {"part": "0c1d...", "value": {...}}                             settings, machine or data that records share
    {"run": "4a00b63bd773", "cells": [[0, 0, 0]], ..., "record": {...}, "curves": [...]}      a job and its record

Each run is one line, in the order of the suite's cells. A job without a record is not finished. Numbers of a record are
stored unchanged. The file has only those curves of metrics.jsonl that the suite's figures show, thinned as in a report.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, ValidationError

from dipole.benchmarks.manifest import CellEntry, JobEntry, Manifest
from dipole.benchmarks.suite import CHANGED, Sized
from dipole.core.record import AddedResult, Part, RunRecord, schema_problem
from dipole.core.train.identity import values_hash
from dipole.core.utils.errors import ConfigError, ReceivedError, RecordError
from dipole.core.utils.files import atomic_write, disk_refusing, is_file
from dipole.core.utils.received import parse_json, read_json, read_lines

SUFFIX = ".jsonl"
VERSION = 1
SHIPPED = Path(__file__).parent / "results" / "suites"  # the results that come with dipole
SHIPPED_NAME = "shipped"  # their name on the command line
SHARED = ("config", "versions", "hardware", "seeds", "data")
"""Fields that many records have in common. Each value has a line of its own."""
OWN = ("name", "objective", "seed")  # fields of a configuration that its record repeats
BETWEEN = re.compile(r", (?=[\w-]+(?:\.[\w-]+)+=)")
"""The separator in the list of settings by which a suite was changed."""
MOST_POINTS = 160  # points of a curve that a picture shows
Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Curve:
    """One quantity of one run: values at rising steps."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class StoredRun:
    """A finished run: its record without `identity`, which follows from its settings, and its folder's other files."""

    record: RunRecord
    curves: dict[str, Curve] = field(default_factory=dict)  # of metrics.jsonl
    measured: dict[str, AddedResult] = field(default_factory=dict)  # results that another program added later
    points: Any = None  # the contents of points.json

    @property
    def whole(self) -> RunRecord:
        added = {name: each.value for name, each in self.measured.items()}
        return self.record.model_copy(update={"results": added | self.record.results})


@dataclass(frozen=True)
class StoredSuite:
    """The contents of a results file: an expanded suite and its finished runs by name."""

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
    """Read a results file, once if it is unchanged, or raise RecordError. Do not change what is returned."""
    if path.suffix == ".toml":
        raise RecordError(f"{path} is a suite or a recipe. Give the folder of its runs, such as `dipole report runs`.")
    stat = path.stat() if is_file(path) else None
    return _read(path.absolute(), stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=128)
def _read(path: Path, stamp: tuple[int, ...] | None) -> StoredSuite:
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
    # Jobs name rows and columns by number.
    suite = Manifest.model_validate(head.suite | {"jobs": []})
    jobs = []
    for line in runs:
        if odd := [(r, c) for r, c, _ in line.cells if r >= len(suite.rows) or c >= len(suite.columns)]:
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
    return [place] if is_file(place) else sorted(path for path in place.glob(f"*{SUFFIX}") if is_file(path))


def some_files(place: Path) -> list[Path]:
    """Return the results files of a place, or raise ConfigError if there are none."""
    if paths := results_files(place):
        return paths
    raise ConfigError(f"no results file {place}, and none in it. `dipole results add RUNS --out DIR` writes some.")


def known_runs(places: Iterable[Path]) -> dict[str, RunRecord]:
    """Return the finished runs of results files. Errors as of `some_files` and `read_results_file`."""
    suites = [read_results_file(path) for place in places for path in some_files(place)]
    return {name: run.whole for suite in suites for name, run in suite.runs.items() if run.record.status == "done"}


def shipped_runs(sized: Sized) -> set[str]:
    """Return the shipped runs of a suite, none if its file is missing or has another version."""
    try:
        return set(read_results_file(SHIPPED / f"{sized.suite.name}-{sized.name}{SUFFIX}").runs)
    except RecordError:
        return set()


def stored_overrides(places: Iterable[Path]) -> dict[tuple[str, str], list[str]]:
    """Return the settings (`--set`) by which suites of results files were changed: (suite, scale) -> texts."""
    found = [read_results_file(path).manifest for place in places for path in some_files(place)]
    return {(m.suite, m.scale): BETWEEN.split(str(text)) for m in found if (text := m.protocol.get(CHANGED))}


def write_results_file(path: Path, suite: StoredSuite) -> None:
    """Write a results file atomically. RecordError if it cannot be written."""
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in _lines(suite))
    with disk_refusing(f"cannot write {path}", RecordError, "--to"):
        atomic_write(path, text)


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
    left_out = {"jobs"} if manifest.not_decidable else {"jobs", "not_decidable"}
    yield {"dipole": "results", "schema_version": VERSION, "suite": manifest.model_dump(mode="json", exclude=left_out)}
    yield from ({"part": name, "value": shared[name]} for name in sorted(shared))
    yield from sorted(runs, key=lambda line: line["cells"])


def _line(kept: StoredRun, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a finished run. Its shared parts are added to `shared`."""

    def part(value: dict[str, Any]) -> str:
        name = values_hash(value)
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
    groups: dict[tuple[float, ...], dict[str, list[float]]] = {}
    for name, curve in sorted(kept.curves.items(), key=lambda item: (item[1].steps, item[0])):
        groups.setdefault(curve.steps, {})[name] = list(map(_short, curve.values))
    line = {
        "record": values,
        "curves": [{"steps": list(map(_short, steps)), "values": each} for steps, each in groups.items()],
        "measured": {name: result.model_dump() for name, result in kept.measured.items()},
    }
    if kept.points is not None:
        line["points"] = kept.points
    return {name: value for name, value in line.items() if value or name == "points"}


def _short(value: float) -> float:
    """Return an equal number that JSON writes with fewer letters."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def merged(one: StoredSuite, other: StoredSuite, replaces: bool = False) -> tuple[StoredSuite, list[str], list[str]]:
    """Merge results files of one suite. Where they differ, `one` counts, or `other` if it `replaces`.

    Also return the conflicts, and the runs on other data, which are left out, as sentences.
    """
    manifest, conflicts = merged_manifests(one.manifest, other.manifest, replaces)
    if conflicts and not replaces:
        return one, conflicts, []
    jobs = {job.hash for job in manifest.jobs}
    runs = {name: run for name, run in one.runs.items() if name in jobs}
    new = [run.record for name, run in other.runs.items() if name not in runs]
    foreign = strangers([run.record for run in runs.values()], new) if new else {}
    left = [f"run {name} of {manifest.name} {why}. Keep it in another folder" for name, why in foreign.items()]
    for name, run in other.runs.items():
        if name in foreign:
            continue
        old = runs.setdefault(name, run)
        older = replace(old, measured=run.measured | old.measured)
        newer = replace(run, measured=old.measured | run.measured)
        runs[name] = older
        if odd := differing(older.whole, newer.whole):
            conflicts.append(f"run {name} of {manifest.name} has other results: {odd}")
            runs[name] = newer if replaces else old
    return StoredSuite(manifest, runs), conflicts, left


def merged_manifests(mine: Manifest, theirs: Manifest, replaces: bool = False) -> tuple[Manifest, list[str]]:
    """Return one suite with the jobs of both. If they differ in more, return the one that counts and the conflict."""
    fields = [name for name in Manifest.model_fields if name not in ("jobs", "not_decidable")]
    changed = [name for name in fields if getattr(mine, name) != getattr(theirs, name)]
    filled = {(cell.row, cell.column, cell.seed): job.hash for job in mine.jobs for cell in job.cells}
    if any(filled.get((c.row, c.column, c.seed), job.hash) != job.hash for job in theirs.jobs for c in job.cells):
        changed.append("the settings of its runs")
    both = theirs if replaces else mine
    if changed:
        return both, [f"the suite {mine.name} differs between the two: {', '.join(changed)}"]
    jobs = {job.hash: job for job in (*mine.jobs, *theirs.jobs)}
    return both.model_copy(update={"jobs": list(jobs.values())}), []


def differing(one: RunRecord, other: RunRecord) -> str:
    """Describe the first result or diagnostic in which two records of one run differ, or return ""."""
    for mine, theirs in ((one.results, other.results), (one.diagnostics, other.diagnostics)):
        for key in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(key), theirs.get(key)
            if a != b:
                return f"{key} is {a} ({one.hardware.device_name}) and {b} ({other.hardware.device_name})"
    return ""


def strangers(known: Iterable[RunRecord], more: Iterable[RunRecord] = ()) -> dict[str, str]:
    """Return the runs of `more` on other data than `known`: run -> reason. Of one of them alone, return its minority.

    Runs of one seed on data of one name and size, with the same table of their domain, have the same data. If several
    seeds of `known` have the same data, data do not depend on the seed.
    """
    newer = list(more)
    trusted = list(known) or newer
    counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for record in trusted:
        counts[_name(record), record.seed][_fingerprint(record)] += 1
    usual = {place: each.most_common(1)[0][0] for place, each in counts.items()}
    found = {}
    for record in newer or trusted:
        name, own = _name(record), _fingerprint(record)
        of_name = [each for (of, _), each in usual.items() if of == name]
        wanted = usual.get((name, record.seed), own)
        if (name, record.seed) not in usual and len(of_name) > 1 and len(set(of_name)) == 1:
            wanted = of_name[0]
        if own != wanted:
            prints = f"(fingerprint {own[:12]}) than the other runs ({wanted[:12]})"
            found[record.hash] = f"was measured on other data {prints}"
    return found


def _name(record: RunRecord) -> str:
    table = record.config.get(record.domain)  # such as `toy.imbalance` and `vision.data.size`
    return json.dumps([record.domain, record.data.get("name"), record.data.get("sizes"), table], sort_keys=True)


def _fingerprint(record: RunRecord) -> str:
    return str(record.data.get("fingerprint"))


@dataclass(frozen=True)
class RunFiles:
    """The places of the files of each run, by its name: its folder, or a run of a results file."""

    folders: dict[str, Path] = field(default_factory=dict)
    stored: dict[str, StoredRun] = field(default_factory=dict)
    folder: Path = Path("runs")  # of all other runs

    def place(self, run: str) -> Path:
        return self.folders.get(run, self.folder / run)

    def curves(self, run: str, names: Iterable[str]) -> dict[str, Curve]:
        if (found := self.stored.get(run)) is not None:
            return {name: found.curves[name] for name in names if name in found.curves}
        return read_curves(self.place(run) / "metrics.jsonl", names)

    def points(self, run: str) -> Any:
        """Return the content of points.json, or None if it is missing or damaged."""
        if run in self.stored:
            return self.stored[run].points
        try:
            return read_json(self.place(run) / "points.json")
        except ReceivedError:
            return None


def read_curves(path: Path, names: Iterable[str]) -> dict[str, Curve]:
    """Read the curves of the named quantities, without damaged lines and values that are no numbers."""
    marks = {name: json.dumps(name) for name in names}
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with suppress(ReceivedError):  # from an unreadable line on, the file is ignored
        for raw in read_lines(path):
            try:
                text = raw.decode()
                if not any(mark in text for mark in marks.values()):
                    continue
                line = json.loads(text)  # only numbers are taken, so the checks of `parse_json` are not needed
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _is_number(step := line.get("step")):
                for name in marks:
                    if _is_number(value := line.get(name)):
                        points[name].append((float(step), float(value)))
    curves = {}
    for name, found in points.items():
        every = -(-len(found) // MOST_POINTS)
        kept = [p for i, p in enumerate(found) if i % every == 0 or i == len(found) - 1]
        curves[name] = Curve(tuple(step for step, _ in kept), tuple(value for _, value in kept))
    return curves


def _is_number(value: object) -> TypeGuard[float]:
    # A float from 1e999 on is infinite, an integer of that size fits no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
