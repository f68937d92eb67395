"""The printed tables of the papers as objects."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from dipole.benchmarks.claims.claim_specs import ClaimSpec, Part
from dipole.benchmarks.claims.protocol import paper
from dipole.core.train.shipped import shipped
from dipole.core.utils.errors import DataError, nearest

PAPERS = ("arora", "lmcl", "cacr", "cllr")
# SUBJ and MPQA levels look exchanged at the source of the baseline rows that two papers share.
EXCHANGED = {"lmcl-table4": ("SUBJ", "MPQA"), "cllr-table2": ("SUBJ", "MPQA")}


@dataclass(frozen=True)
class PrintedCell:
    """One printed number, in the unit of its table.

    Args:
        mean: None if the cell is a dash or unreadable.
        std: None if the paper prints none.
        drop: what the paper prints as the loss against the balanced case. None elsewhere.
    """

    mean: float | None
    std: float | None = None
    drop: float | None = None


@dataclass(frozen=True)
class PrintedRow:
    """A row of a printed table.

    Args:
        method: as the paper calls it.
        group: the part of the table, if methods come several times, or None.
        objective: its text, if dipole has it, or None.
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
        paper_table: its number there, such as "Table 2".
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
        """Number of trials behind each cell, None if the paper does not say."""
        trials = self.protocol.get("trials")
        return trials if isinstance(trials, int) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Cautions for readers of the numbers."""
        notes = list(self.issues)
        if self.id in EXCHANGED:
            one, other = EXCHANGED[self.id]
            notes.insert(0, f"{one} and {other} are as printed; their levels look exchanged in the paper.")
        return tuple(notes)

    def row(self, method: str, group: str | None = None) -> PrintedRow:
        """Return the row of a method, or of a row's label.

        Args:
            method: name of the method, or a label.
            group: group of the row, or None.

        Raises:
            DataError: if there is no such row, or more than one.
        """
        if (found := self.find(row_label(method, group))) is not None:
            return found
        labels = [r.label for r in self.rows]
        raise DataError(f"{self.id} has no single row {row_label(method, group)!r}.{nearest(method, labels)}")

    def value(self, row: str, column: str, kind: str = "mean") -> float | None:
        """Return a printed number, or None if there is no such row or column, or nothing is printed.

        Args:
            row: its label, or its method if it is the only row of the method.
            column: its name.
            kind: "mean", "std" or "drop", the loss against the balanced case.
        """
        found = self.find(row)
        return getattr(found.cells[column], kind) if found and column in found.cells else None

    def find(self, name: str) -> PrintedRow | None:
        """Return the row of a label, or of a method with a single row, else None.

        Args:
            name: label or method.
        """
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, PrintedRow]:
        methods, labels = Counter(row.method for row in self.rows), Counter(row.label for row in self.rows)
        found = {row.method: row for row in self.rows if methods[row.method] == 1}
        return found | {row.label: row for row in self.rows if labels[row.label] == 1}

    def samples(self, row: str, column: str, kind: str = "mean") -> Mapping[int, float] | None:
        """Return None, because printed tables have no single trials.

        Args:
            row: label of the row.
            column: name of the column.
            kind: kind of the numbers.
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
        not_tested: why there are none, or "".
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
    """Return the label of a row: the method, or "METHOD / GROUP".

    Args:
        method: name of the method.
        group: group of the row, or None.
    """
    return f"{method} / {group}" if group else method


@cache
def tables() -> Mapping[str, PrintedTable]:
    """Return every printed table by its id."""
    return {t.id: t for name, found in _papers().items() for t in (_table(name, raw) for raw in found["tables"])}


@cache
def figures() -> Mapping[str, Figure]:
    """Return every figure by its id: what is plotted. No values were measured off a plot."""
    return {
        raw["id"]: Figure(raw["id"], name, raw["plotted"], raw.get("settings", {}), tuple(raw.get("claims", ())))
        for name, found in _papers().items()
        for raw in found["figures"]
    }


def claims() -> tuple[Claim, ...]:
    """Return every claim of the papers, in their order.

    Raises:
        DataError: a claim's spec names a test that the claim does not have.
    """
    return tuple(claim for name in _papers() for claim in claims_of(name))


@cache
def claims_of(name: str) -> tuple[Claim, ...]:
    """Return every claim of a paper, in its order. See `claims`.

    Args:
        name: id of the paper.
    """
    specs = {spec.id: spec for spec in paper(name).claims}
    return tuple(_claim(name, raw, specs.get(raw["id"], ClaimSpec(id=raw["id"]))) for raw in _papers()[name]["claims"])


def table(name: str) -> PrintedTable:
    """Return a printed table.

    Args:
        name: id of the table.

    Raises:
        DataError: if there is no such table.
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


def _claim(name: str, raw: Mapping[str, Any], spec: ClaimSpec) -> Claim:
    tests = tuple(raw.get("tests", ()))
    if odd := sorted({i for part in spec.parts for i in part.tests if not 0 <= i < len(tests)}):
        raise DataError(f"claim {raw['id']} has {len(tests)} tests, and its spec names number {odd[0]}")
    why = spec.not_tested or ("" if tests else "no comparison of numbers is known that would show it")
    return Claim(
        raw["id"], name, raw["statement"], raw["where"], raw["basis"], tests, raw.get("note", ""), spec.parts, why
    )


def _table(name: str, raw: Mapping[str, Any]) -> PrintedTable:
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
        name,
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
