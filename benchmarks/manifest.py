"""The description of an expanded suite in the runs folder. A report needs neither recipes nor a domain."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dipole.benchmarks.run_records import BENCH, Problem
from dipole.benchmarks.suite import FileName, Job, Sized, filled
from dipole.core.record import read_part
from dipole.core.utils.errors import RecordError
from dipole.core.utils.files import atomic_write, why


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CellEntry(_Part):
    """One cell with one seed, which a job gives a number for.

    Attributes:
        row: label of its row.
        column: name of its column.
        seed: of the run.
    """

    row: str
    column: str
    seed: int


class JobEntry(_Part):
    """One run of a suite, and the cells that it fills.

    Attributes:
        hash: of the run, the name of its folder.
        command: what is executed, word by word.
        processes: how many it takes.
        cells: those it gives numbers for, one at least.
    """

    hash: str
    command: list[str]
    processes: int
    cells: list[CellEntry] = Field(min_length=1)


class RowEntry(_Part):
    """A row: one method.

    Attributes:
        label: "method" or "method / group".
        objective: its text.
        base: label of the row that it is tested against, or None.
        fill: values of placeholders in the metrics of columns, by name.
    """

    label: str
    objective: str
    base: str | None
    fill: dict[str, str] = {}


class ColumnEntry(_Part):
    """A column: one metric.

    Attributes:
        name: of the column.
        metric: name of the number in a record (`measure`), with placeholders for the row's `fill`.
        factor: multiplies the number.
        higher_is_better: False for costs.
        unit: of the product, such as "%".
    """

    name: str
    metric: str
    factor: float
    higher_is_better: bool
    unit: str

    @property
    def label(self) -> str:
        """The name with the unit, for axes and heads."""
        if not self.unit:
            return self.name
        return f"{self.name} ({self.unit})"

    @property
    def sign(self) -> int:
        """1, or -1 if smaller values are better."""
        if self.higher_is_better:
            return 1
        return -1

    def metric_of(self, row: RowEntry) -> str:
        """Return the metric of a row.

        Args:
            row: the row.
        """
        return filled(self.metric, row.fill)


class Manifest(_Part):
    """One suite at one scale as it was expanded. Fields are only ever added, with a default.

    Attributes:
        schema_version: of this description.
        suite: name of the suite.
        scale: name of the scale.
        title: a line.
        kind: "table", "figure" or "study".
        published: id of the printed table that it makes again, or None if there is none.
        protocol: what is done otherwise than the paper says, by name.
        x_label: of the horizontal axis, for figures.
        y_label: of the vertical axis.
        show: what the report draws of it.
        note: a remark for the report.
        rows: in their order.
        columns: in their order.
        jobs: every run.
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


def manifest(sized: Sized, jobs: list[Job]) -> Manifest:
    suite = sized.suite
    same = {name: getattr(suite, name) for name in ("title", "kind", "published", "x_label", "y_label", "note")}
    return Manifest(
        **same,
        suite=suite.name,
        scale=sized.name,
        protocol=dict(sized.protocol),
        show=list(suite.show),
        rows=[RowEntry(label=r.label, objective=r.objective, base=sized.base_of(r), fill=r.fill) for r in sized.rows],
        columns=[
            ColumnEntry(name=c.name, metric=c.metric, factor=c.factor, higher_is_better=c.higher_is_better, unit=c.unit)
            for c in sized.columns
        ],
        jobs=[
            JobEntry(
                hash=job.hash,
                command=job.command,
                processes=sized.scale.processes,
                cells=[CellEntry(row=c.row, column=c.column, seed=c.seed) for c in job.cells],
            )
            for job in jobs
        ],
    )


def write_manifest(runs: Path, found: Manifest) -> Path:
    path = runs / BENCH / "suites" / f"{found.name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, found.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {why(error)}") from error
    return path


def read_manifests(runs: Path) -> tuple[list[Manifest], list[Problem]]:
    """Return every suite that ran in a folder of runs, and a problem for each damaged file.

    Args:
        runs: the folder. It is not changed.
    """
    found, problems = [], []
    for path in sorted((runs / BENCH / "suites").glob("*.json")):
        try:
            one = read_part(path, Manifest)
        except RecordError as error:
            problems.append(Problem(path, f"the description of a suite {error}"))
        else:
            if path.stem == one.name:
                found.append(one)
            else:
                problems.append(Problem(path, f"the description is that of {one.name}, not of this file"))
    return found, problems
