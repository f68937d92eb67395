"""The printed tables of the papers as objects."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dipole.benchmarks.protocol import papers
from dipole.benchmarks.report.readings import Part, Reading
from dipole.core.train.shipped import shipped
from dipole.core.utils.errors import DataError, nearest

PAPERS = ("arora", "lmcl", "cacr", "cllr")
# SUBJ and MPQA levels look exchanged at the source of the baseline rows that two papers share.
EXCHANGED = {"lmcl-table4": ("SUBJ", "MPQA"), "cllr-table2": ("SUBJ", "MPQA")}


@dataclass(frozen=True)
class PrintedCell:
    """One printed number, in the unit of its table.

    Args:
        mean: None where the cell is a dash or unreadable.
        std: None where the paper prints none.
        drop: what the paper prints as the loss against the balanced case; None elsewhere.
    """

    mean: float | None
    std: float | None = None
    drop: float | None = None


@dataclass(frozen=True)
class PrintedRow:
    """A row of a printed table.

    Args:
        method: as the paper calls it.
        group: the part of the table it stands in, where methods come several times; else None.
        objective: its text, where dipole has it; else None.
        cells: by column.
        note: a caution on the row.
    """

    method: str
    group: str | None
    objective: str | None
    cells: Mapping[str, PrintedCell]
    note: str = ""

    @property
    def label(self) -> str:
        """Method and group, "METHOD / GROUP", or the method alone."""
        return row_label(self.method, self.group)


@dataclass(frozen=True)
class PrintedTable:
    """A printed table: methods are rows, whatever the paper's layout.

    Args:
        id: its name, such as "cacr-table2".
        paper: "arora", "lmcl", "cacr", "cllr", or that of another package.
        paper_table: where it stands there, such as "Table 2".
        caption: its caption.
        domain: "vision", "text", "rl", "synthetic" or "cost".
        metric: what the numbers are, with their unit.
        higher_is_better: of all columns.
        protocol: what the paper says of how they were made, by name.
        columns: names, in their order.
        rows: in their order.
        issues: cautions a reader needs.
        reconstructed: what could not be read off the page as it stands: what was read, the value taken, and why.
    """

    id: str
    paper: str
    paper_table: str
    caption: str
    domain: str
    metric: str
    higher_is_better: bool
    protocol: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: tuple[PrintedRow, ...]
    issues: tuple[str, ...] = ()
    reconstructed: tuple[Mapping[str, Any], ...] = ()

    @property
    def trials(self) -> int | None:
        """Number of trials behind each cell, None where the paper does not say."""
        trials = self.protocol.get("trials")
        return trials if isinstance(trials, int) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions a reader needs beside the numbers."""
        notes = list(self.issues)
        if self.id in EXCHANGED:
            one, other = EXCHANGED[self.id]
            notes.insert(0, f"{one} and {other} are as printed; their levels look exchanged in the paper.")
        return tuple(notes)

    def row(self, method: str, group: str | None = None) -> PrintedRow:
        """The row of a method.

        Args:
            method: as the paper calls it, or a row's label.
            group: the part of the table, where methods come several times.

        Raises:
            DataError: there is no such row, or more than one.
        """
        if (found := self.find(row_label(method, group))) is not None:
            return found
        labels = [r.label for r in self.rows]
        raise DataError(f"{self.id} has no single row {row_label(method, group)!r}.{nearest(method, labels)}")

    def value(self, row: str, column: str, kind: str = "mean") -> float | None:
        """The printed number of a row; None where there is no such row or column, or nothing is printed.

        Args:
            row: its label, or its method where one row alone has it.
            column: its name.
            kind: "mean", "std" or "drop", the loss against the balanced case.
        """
        found = self.find(row)
        return getattr(found.cells[column], kind) if found and column in found.cells else None

    def find(self, name: str) -> PrintedRow | None:
        """The row of a name; None where there is none, or more than one.

        Args:
            name: a label, or a method that one row alone has.
        """
        labelled = [r for r in self.rows if r.label == name] or [r for r in self.rows if r.method == name]
        return labelled[0] if len(labelled) == 1 else None

    def samples(self, row: str, column: str, kind: str = "mean") -> Mapping[int, float] | None:
        """None: printed tables hold no single trials.

        Args:
            row: as of `value`.
            column: as of `value`.
            kind: as of `value`.
        """
        return None


@dataclass(frozen=True)
class Figure:
    """A figure: what is plotted, without values.

    Args:
        id: its name.
        paper: as of `PrintedTable`.
        plotted: what is plotted, in words.
        settings: what the paper says of how, by name.
        claims: ids of the claims that it shows.
    """

    id: str
    paper: str
    plotted: str
    settings: Mapping[str, Any]
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Args:
        id: its name.
        paper: as of `PrintedTable`.
        statement: in words.
        where: in the paper.
        basis: what it rests on: "table", "text" or "theory".
        tests: its machine-readable comparisons.
        note: a caution.
        parts: how the tests are judged.
        not_tested: why there are none; else "".
    """

    id: str
    paper: str
    statement: str
    where: str
    basis: str
    tests: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    parts: tuple[Part, ...] = ()
    not_tested: str = ""

    @property
    def tables(self) -> frozenset[str]:
        """Ids of the printed tables that its tests speak of."""
        return frozenset(t[key] for t in self.tests for key in ("table", "table_b") if key in t)


def row_label(method: str, group: str | None = None) -> str:
    """Label of a row: the method, or "METHOD / GROUP".

    Args:
        method: as the paper calls it.
        group: the part of the table; None or "" where there is none.
    """
    return f"{method} / {group}" if group else method


@cache
def tables() -> Mapping[str, PrintedTable]:
    """Every printed table by its id."""
    return {t.id: t for paper, found in _papers().items() for t in (_table(paper, raw) for raw in found["tables"])}


@cache
def figures() -> Mapping[str, Figure]:
    """Every figure by its id: what is plotted; no values were measured off a plot."""
    return {
        raw["id"]: Figure(raw["id"], paper, raw["plotted"], raw.get("settings", {}), tuple(raw.get("claims", ())))
        for paper, found in _papers().items()
        for raw in found["figures"]
    }


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of the papers, in their order.

    Raises:
        DataError: a claim is read by a test that it does not have.
    """
    return tuple(_claim(paper, raw) for paper, found in _papers().items() for raw in found["claims"])


def table(name: str) -> PrintedTable:
    """The printed table of an id.

    Args:
        name: its id; `tables` has all of them.

    Raises:
        DataError: there is none.
    """
    if name not in tables():
        raise DataError(f"no published table {name!r}.{nearest(name, tables())}")
    return tables()[name]


@cache
def _papers() -> Mapping[str, Mapping[str, Any]]:
    """Tables, figures and claims by paper: dipole's own in their order, then those of other packages."""
    found = shipped("published", "*.json")
    names = [*PAPERS, *sorted(found.keys() - set(PAPERS))]
    return {name: json.loads(found[name].read_text(encoding="utf-8")) for name in names}


@cache
def _readings() -> Mapping[str, Reading]:
    """How claims are judged, by their id."""
    return {reading.id: reading for paper in papers().values() for reading in paper.claims}


def _claim(paper: str, raw: Mapping[str, Any]) -> Claim:
    reading = _readings().get(raw["id"], Reading(id=raw["id"]))
    tests = tuple(raw.get("tests", ()))
    if odd := sorted({i for part in reading.parts for i in part.tests if not 0 <= i < len(tests)}):
        raise DataError(f"claim {raw['id']} has {len(tests)} tests, and its reading names number {odd[0]}")
    why = reading.not_tested or ("" if tests else "no comparison of numbers is known that would show it")
    return Claim(
        raw["id"], paper, raw["statement"], raw["where"], raw["basis"], tests, raw.get("note", ""), reading.parts, why
    )


def _table(paper: str, raw: Mapping[str, Any]) -> PrintedTable:
    rows: Sequence[PrintedRow] = [
        PrintedRow(
            r["method"],
            r.get("group"),
            r["objective"],
            {column: PrintedCell(c["mean"], c["std"], c.get("drop")) for column, c in r["cells"].items()},
            r.get("note", ""),
        )
        for r in raw["rows"]
    ]
    return PrintedTable(
        raw["id"],
        paper,
        raw["paper_table"],
        raw["caption"],
        raw["domain"],
        raw["metric"],
        raw["higher_is_better"],
        raw["protocol"],
        tuple(raw["columns"]),
        tuple(rows),
        tuple(raw.get("issues", ())),
        tuple(raw.get("reconstructed", ())),
    )
