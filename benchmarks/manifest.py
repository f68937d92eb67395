"""The description of an expanded suite in the runs folder. A report needs neither recipes nor a domain."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dipole.benchmarks.run_records import BENCH, Problem, read_parts
from dipole.core.record import Part
from dipole.core.utils.errors import RecordError
from dipole.core.utils.files import atomic_write, disk_refusing


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
    """A row: one method, labelled "method" or "method / group", its objective, and the label of its base row.

    `fill` has values of placeholders in the metrics of columns, by name.
    """

    label: str
    objective: str
    base: str | None
    fill: dict[str, str] = Field(default_factory=dict)


EFFECTS = {"%": (1.0, "1 point"), "return": (50.0, "50 return")}
"""Differences that matter, by unit, where nothing is printed."""


class ColumnEntry(Part):
    """A column: one number of a record, times a factor, in a unit such as "%".

    `metric` is the name of the number in the record, with placeholders for the row's `fill`, and `base` the name of the
    column that rows without a base are tested against.
    """

    name: str
    metric: str
    factor: float
    higher_is_better: bool
    unit: str
    base: str | None = None

    @property
    def label(self) -> str:
        """The name with the unit, for axes and heads."""
        if not self.unit:
            return self.name
        return f"{self.name} ({self.unit})"

    @property
    def sign(self) -> int:
        """1, or -1 if smaller values are better."""
        return 1 if self.higher_is_better else -1

    def metric_of(self, row: RowEntry) -> str:
        """Return the metric of a row."""
        return filled(self.metric, row.fill)

    def effect(self, level: float) -> tuple[float, str]:
        """Return a difference that matters, and its words: a point, 50 of a return, or else a tenth of the level."""
        if not self.unit and self.metric.endswith("accuracy"):
            return 0.01 * abs(self.factor), "1 point"
        return EFFECTS.get(self.unit, (abs(level) / 10, "a tenth of the mean"))


class Manifest(Part):
    """One suite at one scale as it was expanded. Fields are only ever added, with a default.

    `published` is the id of the printed table that it repeats, `protocol` has the differences from the paper, and
    `not_decidable` says why its scale cannot decide anything. For the others see `suite.Suite`.
    """

    schema_version: Literal[1] = 1
    suite: FileName
    scale: FileName
    title: str
    kind: str
    published: str | None
    protocol: dict[str, Any]
    x_label: str
    y_label: str
    show: list[str]
    note: str
    rows: list[RowEntry]
    columns: list[ColumnEntry]
    jobs: list[JobEntry]
    not_decidable: str = ""

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
        """Return whether it repeats a printed table by the paper's protocol."""
        return self.published is not None and not self.protocol


def write_manifest(runs: Path, found: Manifest) -> Path:
    path = runs / BENCH / "suites" / f"{found.name}.json"
    with disk_refusing(f"cannot write {path}", RecordError):
        atomic_write(path, found.model_dump_json(indent=1) + "\n")
    return path


def read_manifests(runs: Path) -> tuple[list[Manifest], list[Problem]]:
    """Return every suite that ran in a folder of runs, and a problem for each damaged file. Changes nothing."""
    every, problems = read_parts(runs / BENCH / "suites", Manifest, "the description of a suite")
    for path, one in list(every.items()):
        if path.stem != one.name:
            problems.append(Problem(path, f"the description is that of {one.name}, not of this file"))
            del every[path]
    return list(every.values()), problems
