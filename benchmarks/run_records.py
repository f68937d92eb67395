"""Read the records of a runs folder. Nothing in the folder is changed or removed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dipole.core.record import MEASURED, Part, RunRecord, read_part, read_record, with_additions
from dipole.core.utils.errors import DataError, RecordError
from dipole.core.utils.files import disk_refusing

Content = TypeVar("Content", bound=Part)
BENCH = ".bench"
"""Folder inside a runs folder for the files of `dipole bench`: expanded suites, claims, logs."""


@dataclass(frozen=True)
class Problem:
    """A path that is not a readable record, and why, or a `conflict`: the run or suite of which there are two versions.

    It is reported and left unchanged.
    """

    path: Path
    message: str
    conflict: str = ""


@dataclass(frozen=True)
class Collection:
    """The records of a runs folder by run hash, and the problems met on the way."""

    records: dict[str, RunRecord] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def done(self) -> dict[str, RunRecord]:
        """Records of finished runs, by run hash."""
        return {name: record for name, record in self.records.items() if record.status == "done"}


def read_records(folder: Path) -> Collection:
    """Read every record of a runs folder. A corrupt, foreign or misplaced file becomes a problem.

    Raise DataError if there is no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"no runs folder {folder}. Give the folder that `dipole train` or `dipole bench` wrote.")
    found = Collection()
    with disk_refusing(f"the runs folder {folder} cannot be read", DataError):
        # Results files are read, and their errors reported, by `gather`.
        paths = [path for path in sorted(folder.iterdir()) if path.suffix != ".jsonl" or path.is_dir()]
    for path in paths:
        if path.name.startswith("."):
            continue
        try:
            if not path.is_dir():
                raise RecordError("not the folder of a run")
            # Opening a pipe or device of that name would block.
            if not (path / "record.json").is_file():
                message = "no file record.json in it"
                if (path / "config.toml").exists():
                    message = "started, no record yet"
                raise RecordError(message)
            record = read_record(path / "record.json")
            if record.hash != path.name:
                raise RecordError(f"the record is that of run {record.hash}, not of this folder")
        except (RecordError, OSError) as error:
            found.problems.append(Problem(path, str(error)))
            continue
        found.records[record.hash] = record
        try:
            found.records[record.hash] = with_additions(record, path)
        except RecordError as error:
            found.problems.append(Problem(path / MEASURED, str(error)))
    return found


def read_parts(folder: Path, kind: type[Content], what: str) -> tuple[dict[Path, Content], list[Problem]]:
    """Read the JSON files of a folder: their contents by path, and a problem for each damaged file."""
    found, problems = {}, []
    for path in sorted(folder.glob("*.json")):
        try:
            found[path] = read_part(path, kind)
        except RecordError as error:
            problems.append(Problem(path, f"{what} {error}"))
    return found, problems


def is_done(folder: Path) -> bool:
    """Return whether a folder holds the valid record of a finished run of its name."""
    try:
        record = read_record(folder / "record.json")
    except RecordError:
        return False
    return record.status == "done" and record.hash == folder.name
