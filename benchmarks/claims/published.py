"""The printed tables of the papers as objects."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from pydantic import TypeAdapter

from dipole.benchmarks.claims.protocol import ClaimPart, ClaimSpec, default_part, paper
from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.plugins import shipped

PAPERS = ("arora", "lmcl", "cacr", "cllr")


@dataclass(frozen=True)
class PrintedCell:
    mean: int | float | None  # None for a dash, or if it is unreadable
    std: int | float | None = None
    drop: int | float | None = None  # the loss against the balanced case


@dataclass(frozen=True)
class PrintedRow:
    """A row of a printed table: a method, and the part of the table (`group`) if methods come several times."""

    method: str
    cells: Mapping[str, PrintedCell]
    group: str | None = None

    @property
    def label(self) -> str:
        return row_label(self.method, self.group)


@dataclass(frozen=True)
class PrintedTable:
    """A printed table: methods are rows, whatever the paper's layout."""

    id: str
    paper: str
    paper_table: str
    caption: str
    domain: str  # "vision", "text", "rl", "synthetic" or "cost"
    metric: str  # what the numbers are, with their unit
    protocol: Mapping[str, Any]  # what the paper says of how they were made
    columns: tuple[str, ...]
    rows: tuple[PrintedRow, ...]
    issues: tuple[str, ...] = ()  # cautions that a reader needs

    @property
    def trials(self) -> int | None:
        """Number of trials behind each cell, None if the paper does not say."""
        trials = self.protocol.get("trials")
        return trials if isinstance(trials, int) else None

    def value(self, row: str, column: str, field: str = "mean") -> float | None:
        """Return a printed "mean", "std" or "drop", or None if there is no such cell, or nothing is printed."""
        found = self.find(row)
        if found is None or column not in found.cells:
            return None
        value: float | None = getattr(found.cells[column], field)
        return value

    def find(self, name: str) -> PrintedRow | None:
        """Return the row of a label, or of a method with a single row, else None."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> Mapping[str, PrintedRow]:
        methods, labels = Counter(row.method for row in self.rows), Counter(row.label for row in self.rows)
        found = {row.method: row for row in self.rows if methods[row.method] == 1}
        return found | {row.label: row for row in self.rows if labels[row.label] == 1}

    def samples(self, row: str, column: str, field: str = "mean") -> Mapping[int, float] | None:
        """Return None, because printed tables have no single trials."""
        return None


@dataclass(frozen=True)
class Claim:
    id: str
    paper: str
    statement: str
    where: str
    basis: str  # "table", "text" or "theory"
    tests: tuple[Mapping[str, Any], ...] = ()  # its machine-readable comparisons
    note: str = ""
    parts: tuple[ClaimPart, ...] = ()  # how they are judged
    not_tested: str = ""  # why there are none

    @property
    def all_parts(self) -> tuple[ClaimPart, ...]:
        """How it is judged: its parts, or one for each of its tests if PAPER.toml has none."""
        return self.parts or tuple(default_part(i, test) for i, test in enumerate(self.tests))

    @property
    def tables(self) -> frozenset[str]:
        return frozenset(t[key] for t in self.tests for key in ("table", "table_b") if key in t)


def row_label(method: str, group: str | None = None) -> str:
    """Return the label of a row: the method, or "METHOD / GROUP"."""
    return f"{method} / {group}" if group else method


@cache
def tables() -> Mapping[str, PrintedTable]:
    raw = [{"paper": name, **table} for name, found in _papers().items() for table in found["tables"]]
    return {table.id: table for table in TypeAdapter(list[PrintedTable]).validate_python(raw)}


@cache
def figures() -> Mapping[str, tuple[str, str]]:
    """Return the paper of every figure, and what it plots in words, by its id."""
    return {raw["id"]: (name, raw["plotted"]) for name, read in _papers().items() for raw in read["figures"]}


def claims() -> tuple[Claim, ...]:
    return tuple(claim for name in _papers() for claim in claims_of(name))


@cache
def claims_of(name: str) -> tuple[Claim, ...]:
    """Return every claim of a paper, in its order. DataError if a spec names a test that its claim does not have."""
    specs, found = {spec.id: spec for spec in paper(name).claims}, []
    for raw in _papers()[name]["claims"]:
        spec, tests = specs.get(raw["id"], ClaimSpec(id=raw["id"])), tuple(raw.get("tests", ()))
        if odd := sorted({i for part in spec.parts for i in part.tests if not 0 <= i < len(tests)}):
            raise DataError(f"claim {raw['id']} has {len(tests)} tests, and its spec names number {odd[0]}")
        why = spec.not_tested
        if not tests and not why:
            why = "no comparison of numbers is known that would show it"
        found.append(Claim(**{**raw, "paper": name, "tests": tests, "parts": spec.parts, "not_tested": why}))
    return tuple(found)


def table(name: str) -> PrintedTable:
    """Return a printed table by its id. DataError if there is no such table."""
    if name not in tables():
        raise DataError(f"no published table {name!r}.{nearest(name, tables())}")
    return tables()[name]


@cache
def _papers() -> Mapping[str, Mapping[str, Any]]:
    """Tables, figures and claims by paper: dipole's own in their order, then those of other packages."""
    found = shipped("published", "*.json")
    names = [*PAPERS, *sorted(found.keys() - set(PAPERS))]
    return {name: json.loads(found[name].read_text(encoding="utf-8")) for name in names}
