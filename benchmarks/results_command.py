"""`dipole results`: add finished runs to results files, or list these files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dipole.benchmarks import results_file
from dipole.benchmarks.manifest import Manifest
from dipole.benchmarks.report.training_charts import SCATTER, drawn_names
from dipole.benchmarks.results_file import SUFFIX, StoredRun, StoredSuite, read_results_file, some_files
from dipole.benchmarks.suite_results import Gathered, gather
from dipole.core.record import AddedResult, read_additions
from dipole.core.utils.errors import ConfigError, RecordError
from dipole.core.utils.files import is_file


@dataclass(frozen=True)
class Added:
    """One suite after `add`: its file, and the numbers of its runs, of all wanted runs and of new runs."""

    path: Path
    suite: str
    runs: int
    wanted: int
    new: int
    bytes: int
    seconds: float
    conflicts: tuple[str, ...] = ()  # differences between file and folders
    left_out: tuple[str, ...] = ()  # unreadable runs, and runs on other data


def add(places: Sequence[Path], to: Path, replaces: bool = False) -> list[Added]:
    """Add the finished runs of every suite to its results file in the folder `to`.

    If a run has other results in the file, or the suite has changed, the file stays as it is unless `replaces` is
    true. Runs on other data and unreadable runs are left out and named. Raise ConfigError if no suite has runs in these
    places, or `to` is a file, RecordError if a results file there is damaged, or cannot be written.
    """
    if is_file(to) or (to.suffix == SUFFIX and not to.is_dir()):
        raise ConfigError(f"--out {to}: give a folder. Each suite gets a file there.")
    found = gather(places)
    # Everything is read before anything is written.
    changes = []
    for manifest in found.manifests:
        path, suite = to / f"{manifest.name}{SUFFIX}", of_suite(found, manifest)
        unread_runs = {job.hash for job in manifest.jobs} - found.done.keys()
        unread = [
            f"run {each.path.name} of {manifest.name} cannot be read: {each.message}"
            for each in found.problems
            if each.path.name in unread_runs and is_file(each.path / "record.json")
        ]
        names = {manifest.name, *(job.hash for job in manifest.jobs)}
        unread += [f"{each.message} ({each.path})" for each in found.problems if each.conflict in names]
        if not is_file(path) and not suite.runs and not unread:
            continue
        there = read_results_file(path) if is_file(path) else StoredSuite(manifest, {})
        both, conflicts, left = results_file.merged(there, suite, replaces)
        changes.append((path, both, len(both.runs.keys() - there.runs.keys()), conflicts, [*unread, *left]))
    if not changes:
        where = ", ".join(map(str, places))
        raise ConfigError(f"no suite has finished runs in {where}. Run one with `dipole bench SUITE --runs DIR`.")
    for path, suite, *_ in changes:
        results_file.write_results_file(path, suite)
    return [_added(path, suite, new, conflicts, left) for path, suite, new, conflicts, left in changes]


def contents(places: Sequence[Path]) -> list[Added]:
    return [_added(path, read_results_file(path), 0, ()) for place in places for path in some_files(place)]


def of_suite(found: Gathered, manifest: Manifest) -> StoredSuite:
    """Return a suite with its finished runs, and the curves and points that its figures show."""
    names, files, done, runs = drawn_names(manifest), found.files, found.done, {}
    for run in (job.hash for job in manifest.jobs if job.hash in done):
        points = files.points(run) if SCATTER in manifest.show else None
        curves = {name: curve for name, curve in files.curves(run, names).items() if curve.steps}
        measured = _measured(found, run)
        results = {name: value for name, value in done[run].results.items() if name not in measured}
        record = done[run].model_copy(update={"results": results, "identity": None})
        runs[run] = StoredRun(record, curves, measured, points)
    return StoredSuite(manifest, runs)


def _measured(found: Gathered, run: str) -> dict[str, AddedResult]:
    if run in found.files.stored:
        return found.files.stored[run].measured
    try:
        return read_additions(found.files.place(run)).results
    except RecordError:
        return {}  # `gather` has reported it


def _added(path: Path, suite: StoredSuite, new: int, conflicts: Sequence[str], left: Sequence[str] = ()) -> Added:
    seconds = sum(run.record.wall_seconds for run in suite.runs.values())
    name, wanted, size = suite.manifest.name, len(suite.manifest.jobs), path.stat().st_size
    return Added(path, name, len(suite.runs), wanted, new, size, seconds, tuple(conflicts), tuple(left))
