"""What a runs folder holds: records, and descriptions of expanded suites. Reading changes nothing in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from dipole.core.record import MEASURED, Part, RunRecord, read_part, read_record, with_additions
from dipole.core.utils.errors import DataError, RecordError
from dipole.core.utils.files import atomic_write, disk_refusing

Content = TypeVar("Content", bound=Part)
BENCH = ".bench"  # folder inside a runs folder for the files of `dipole bench`: expanded suites, claims, logs


@dataclass(frozen=True)
class Problem:
    """A path that is not a readable record, and why, or a `conflict`: the run or suite that has two versions."""

    path: Path
    message: str
    conflict: str = ""


def _file_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}", text):
        raise ValueError(
            f"{text!r} names files: use letters, digits, '-', '_' and '.', at most 80, a letter or digit first"
        )
    return text


FileName = Annotated[str, AfterValidator(_file_name)]


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replace every {name} in a text."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


class CellEntry(Part):
    """One cell of a table: the label of its row, the name of its column, and the seed of the run that fills it."""

    row: str
    column: str
    seed: int


class JobEntry(Part):
    """One run of a suite: its hash, the command that trains it, its processes, and the cells that it fills."""

    hash: str
    command: list[str]
    processes: int
    cells: list[CellEntry] = Field(min_length=1)


class RowEntry(Part):
    """A row: one method, labelled "method" or "method / group", its objective, and the label of its base row."""

    label: str
    objective: str
    base: str | None
    fill: dict[str, str] = Field(default_factory=dict, description="values of placeholders in metrics of columns")


EFFECTS = {"%": (1.0, "1 point"), "return": (50.0, "50 return")}
"""Differences that matter, by unit, where nothing is printed."""


class ColumnEntry(Part):
    """A column: one number of a record, times a factor, in a unit such as "%"."""

    name: str
    metric: str = Field(description="name of the number in the record, with placeholders for the row's `fill`")
    factor: float
    higher_is_better: bool
    unit: str
    base: str | None = Field(None, description="name of the column that rows without a base are tested against")

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def sign(self) -> int:
        """1, or -1 if smaller values are better."""
        return 1 if self.higher_is_better else -1

    def metric_of(self, row: RowEntry) -> str:
        return filled(self.metric, row.fill)

    def effect(self, level: float) -> tuple[float, str]:
        """Return a difference that matters, and its words: a point, 50 of a return, or else a tenth of the level."""
        if not self.unit and self.metric.endswith("accuracy"):
            return 0.01 * abs(self.factor), "1 point"
        return EFFECTS.get(self.unit, (abs(level) / 10, "a tenth of the mean"))


class Manifest(Part):
    """One suite at one scale as it was expanded (see `suite.Suite`). Fields are only ever added, with a default."""

    schema_version: Literal[1] = 1
    suite: FileName
    scale: FileName
    title: str
    kind: str
    published: str | None = Field(description="id of the printed table that it repeats")
    protocol: dict[str, Any] = Field(description="differences from the paper")
    x_label: str
    y_label: str
    show: list[str]
    note: str
    rows: list[RowEntry]
    columns: list[ColumnEntry]
    jobs: list[JobEntry]
    not_decidable: str = Field("", description="why its scale cannot decide anything")

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        rows, columns = {row.label for row in self.rows}, {column.name for column in self.columns}
        if odd := [c for job in self.jobs for c in job.cells if c.row not in rows or c.column not in columns]:
            raise ValueError(f"no row and column for the cell {odd[0].row!r}, {odd[0].column!r}")
        return self

    @property
    def name(self) -> str:
        """Suite and scale as "SUITE-SCALE", the name of its file."""
        return f"{self.suite}-{self.scale}"

    @property
    def is_paper_protocol(self) -> bool:
        return self.published is not None and not self.protocol


def write_manifest(runs: Path, found: Manifest) -> Path:
    path = runs / BENCH / "suites" / f"{found.name}.json"
    with disk_refusing(f"cannot write {path}", RecordError):
        atomic_write(path, found.model_dump_json(indent=1) + "\n")
    return path


def read_manifests(runs: Path) -> tuple[list[Manifest], list[Problem]]:
    """Return every suite that ran in a folder of runs, and a problem for each damaged file."""
    every, problems = read_parts(runs / BENCH / "suites", Manifest, "the description of a suite")
    for path, one in list(every.items()):
        if path.stem != one.name:
            problems.append(Problem(path, f"the description is that of {one.name}, not of this file"))
            del every[path]
    return list(every.values()), problems


@dataclass(frozen=True)
class Records:
    """The records of a runs folder by run hash, and the problems met on the way."""

    records: dict[str, RunRecord] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def done(self) -> dict[str, RunRecord]:
        return {name: record for name, record in self.records.items() if record.status == "done"}


def read_records(folder: Path) -> Records:
    """Read every record of a runs folder. A corrupt or misplaced file becomes a problem. DataError without a folder."""
    if not folder.is_dir():
        raise DataError(f"no runs folder {folder}. Give the folder that `dipole train` or `dipole bench` wrote.")
    found = Records()
    with disk_refusing(f"the runs folder {folder} cannot be read", DataError):
        # Results files are read, and their errors reported, by `gather`.
        paths = [path for path in sorted(folder.iterdir()) if path.suffix != ".jsonl" or path.is_dir()]
    for path in paths:
        if path.name.startswith("."):
            continue
        try:
            if not path.is_dir():
                raise RecordError("not the folder of a run")
            if not (path / "record.json").is_file():
                has_begun = (path / "config.toml").exists()
                raise RecordError("started, no record yet" if has_begun else "no file record.json in it")
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
