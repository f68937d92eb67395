"""Read folders of runs and results files into one collection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipole.benchmarks.manifest import Manifest, read_manifests
from dipole.benchmarks.results_file import (
    StoredRun,
    StoredSuite,
    differing,
    merged,
    read_results_file,
    results_files,
    strangers,
)
from dipole.benchmarks.run_files import RunFiles
from dipole.benchmarks.run_records import Collection, Problem, read_records
from dipole.benchmarks.suite import marked
from dipole.core.record import RunRecord
from dipole.core.utils.errors import DataError, RecordError
from dipole.core.utils.files import is_file, is_folder

CONFLICT = "other results than the same run elsewhere, which are used"


@dataclass(frozen=True)
class Gathered:
    """Everything that a report reads: the records, their suites, curves and points of the runs, and problems.

    Problems are files that could not be read, and contradicting results.
    """

    collection: Collection
    manifests: list[Manifest]
    beside: RunFiles
    problems: list[Problem]


def gather(places: Iterable[Path]) -> Gathered:
    """Return the runs of folders and results files. If two places have the same run, the first counts.

    Raise DataError if a place is neither, or is a single run.
    """
    places = list(places)
    records: dict[str, RunRecord] = {}
    problems: list[Problem] = []
    folders: dict[str, Path] = {}
    kept: dict[str, StoredRun] = {}
    suites: dict[str, StoredSuite] = {}
    damaged: list[Problem] = []
    for place in places:
        if not is_file(place) and not is_folder(place):
            raise DataError(
                f"no runs folder {place}, and no results file. Give what `dipole train`, `dipole bench` or "
                "`dipole results` wrote."
            )
        if is_file(place / "record.json"):
            raise DataError(
                f"{place} is one run. Give its parent folder, {place.parent}. `dipole compare` compares two runs."
            )
        found: list[tuple[Path, StoredSuite]] = []
        if not is_file(place):
            of_folder = read_records(place)
            problems += of_folder.problems
            for name, record in of_folder.records.items():
                if records.get(name) is None or (records[name].status != "done" and record.status == "done"):
                    records[name], folders[name] = record, place / name
                    kept.pop(name, None)
                elif record.status == "done" and (odd := differing(records[name], record)):
                    damaged.append(Problem(place / name, f"{CONFLICT}: {odd}"))
            manifests, unreadable = read_manifests(place)
            damaged += unreadable
            found += [(place, StoredSuite(manifest, {})) for manifest in manifests]
        for path in results_files(place):
            try:
                suite = read_results_file(path)
            except RecordError as error:
                damaged.append(Problem(path, str(error)))
                continue
            found.append((path, suite))
            for name, run in suite.runs.items():
                if name not in records or records[name].status != "done":
                    records[name], kept[name] = run.whole, run
                    folders.pop(name, None)
                    continue
                if odd := differing(records[name], run.whole):
                    damaged.append(Problem(path, f"run {name}: {CONFLICT}: {odd}"))
                if name in kept:
                    kept[name] = _richer(kept[name], run)
        for path, suite in found:
            name = suite.manifest.name
            if name in suites:
                suite, conflicts, _ = merged(suites[name], suite)
                damaged += [Problem(path, said) for said in conflicts]
            suites[name] = suite
    collection = Collection(places[0], records, problems)
    manifests = [marked(suites[name].manifest) for name in sorted(suites)]
    done = collection.done
    for manifest in manifests:
        of_suite = [done[job.hash] for job in manifest.jobs if job.hash in done]
        for name, why in strangers(of_suite).items():
            damaged.append(Problem(places[0], f"{manifest.name}: run {name} {why}"))
    return Gathered(collection, manifests, RunFiles(folders, kept, places[0]), damaged)


def _richer(one: StoredRun, other: StoredRun) -> StoredRun:
    """Merge the curves and points of a run that two suites store."""
    points = other.points if one.points is None else one.points
    return StoredRun(one.record, other.curves | one.curves, other.measured | one.measured, points)


def places_of(runs: Path | Sequence[Path]) -> list[Path]:
    """Return one place or several as a list."""
    return [runs] if isinstance(runs, Path) else list(runs)
