"""The runs folder read back: records, and what is in the way. Nothing in the folder is ever changed or removed here."""

from dataclasses import dataclass, field
from pathlib import Path

from dipole.core.record import RunRecord, read_record
from dipole.core.record.additions import FILE, with_additions
from dipole.core.utils.errors import DataError, RecordError
from dipole.core.utils.files import why

BENCH = ".bench"
"""Folder of a runs folder that holds what `dipole bench` needs: suites as they were expanded, claims, logs."""


@dataclass(frozen=True)
class Problem:
    """A path in the runs folder that is not a readable record. It is reported and left unchanged.

    Args:
        path: where it lies.
        message: what is wrong.
    """

    path: Path
    message: str


@dataclass(frozen=True)
class Collection:
    """The records of a runs folder, and the problems met on the way.

    Args:
        folder: the runs folder.
        records: by run hash.
        problems: what is no readable record.
    """

    folder: Path
    records: dict[str, RunRecord] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def done(self) -> dict[str, RunRecord]:
        """Records of finished runs, by run hash."""
        return {name: record for name, record in self.records.items() if record.status == "done"}


def read_records(folder: Path) -> Collection:
    """Read every record of a runs folder. A corrupt, foreign or misplaced file becomes a problem.

    Raises:
        DataError: there is no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"no runs folder {folder}. Give the folder that `dipole train` or `dipole bench` wrote.")
    found = Collection(folder)
    for path in _entries(folder):
        try:
            if not path.is_dir():
                found.problems.append(Problem(path, "not the folder of a run"))
                continue
            # A pipe or device of that name would be waited for.
            if not (path / "record.json").is_file():
                started = (path / "config.toml").exists()
                found.problems.append(
                    Problem(path, "started, no record yet" if started else "no file record.json in it")
                )
                continue
            record = read_record(path / "record.json")
        except (RecordError, OSError) as error:
            found.problems.append(Problem(path, str(error)))
            continue
        try:
            record = with_additions(record, path)
        except RecordError as error:
            found.problems.append(Problem(path / FILE, str(error)))
        if record.hash != path.name:
            found.problems.append(Problem(path, f"the record is that of run {record.hash}, not of this folder"))
        else:
            found.records[record.hash] = record
    return found


def is_done(folder: Path) -> bool:
    """Return whether a folder holds the valid record of a finished run of its name."""
    try:
        record = read_record(folder / "record.json")
    except RecordError:
        return False
    return record.status == "done" and record.hash == folder.name


def _entries(folder: Path) -> list[Path]:
    try:
        # Files of lines are results files, or mean to be: who gathers them says what is wrong with one.
        return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and not _is_lines(path)]
    except OSError as error:
        raise DataError(f"the runs folder {folder} cannot be read: {why(error)}") from error


def _is_lines(path: Path) -> bool:
    return path.suffix == ".jsonl" and not path.is_dir()
