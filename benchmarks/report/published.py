"""The printed tables of the papers as objects, and the verdict on one of our numbers beside one of theirs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import isfinite, nan
from typing import Any

from dipole.benchmarks.statistics import Summary, against_single_value, pooled_std, seeds_needed, welch
from dipole.core.ground.errors import DataError, nearest

PAPERS = ("arora", "lmcl", "cacr", "cllr")
# SUBJ and MPQA levels look exchanged at the source of the baseline rows that two papers share.
EXCHANGED = {"lmcl-table4": ("SUBJ", "MPQA"), "cllr-table2": ("SUBJ", "MPQA")}
AGREES, DIFFERS, UNDECIDED, NOT_COMPARED = "agrees", "differs", "cannot be decided at this n", "other protocol"


@dataclass(frozen=True)
class PrintedCell:
    """One printed number; `std` is None where the paper prints none, `mean` where the cell is a dash or unreadable."""

    mean: float | None
    std: float | None = None
    drop: float | None = None


@dataclass(frozen=True)
class PrintedRow:
    method: str
    group: str | None
    objective: str | None
    cells: Mapping[str, PrintedCell]
    note: str = ""

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
        if (found := self.find(row_label(method, group))) is not None:
            return found
        labels = [r.label for r in self.rows]
        raise DataError(f"{self.id} has no single row {row_label(method, group)!r}.{nearest(method, labels)}")

    def value(self, row: str, column: str, kind: str = "mean") -> float | None:
        """The printed number of a row label: its mean, std, or drop (the loss against the balanced case)."""
        found = self.find(row)
        return getattr(found.cells[column], kind) if found and column in found.cells else None

    def find(self, name: str) -> PrintedRow | None:
        """The row with this label, or with this method if only one row has it."""
        labelled = [r for r in self.rows if r.label == name] or [r for r in self.rows if r.method == name]
        return labelled[0] if len(labelled) == 1 else None

    def samples(self, row: str, column: str, kind: str = "mean") -> Mapping[int, float] | None:
        """Printed tables hold no single trials."""
        return None


@dataclass(frozen=True)
class Figure:
    id: str
    paper: str
    plotted: str
    settings: Mapping[str, Any]
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper; `tests` are its machine-readable comparisons (none: only its curves would show it)."""

    id: str
    paper: str
    statement: str
    where: str
    basis: str
    tests: tuple[Mapping[str, Any], ...] = ()
    note: str = ""

    @property
    def tables(self) -> frozenset[str]:
        return frozenset(t[key] for t in self.tests for key in ("table", "table_b") if key in t)


@dataclass(frozen=True)
class Comparison:
    """One of our cells beside the printed one. `verdict` is given only where the protocols are the same."""

    published: PrintedCell
    published_n: int | None
    ours: Summary
    difference: float
    low: float
    high: float
    verdict: str
    basis: str
    seeds: int | None = field(default=None)


def row_label(method: str, group: str | None = None) -> str:
    return f"{method} / {group}" if group else method


@cache
def tables() -> Mapping[str, PrintedTable]:
    """Every printed table by its id."""
    return {t.id: t for paper in PAPERS for t in (_table(paper, raw) for raw in _paper(paper)["tables"])}


@cache
def figures() -> Mapping[str, Figure]:
    """Every figure by its id: what is plotted; no values were measured off a plot."""
    return {
        raw["id"]: Figure(raw["id"], paper, raw["plotted"], raw.get("settings", {}), tuple(raw.get("claims", ())))
        for paper in PAPERS
        for raw in _paper(paper)["figures"]
    }


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim of the four papers, in their order."""
    return tuple(
        Claim(c["id"], paper, c["statement"], c["where"], c["basis"], tuple(c.get("tests", ())), c.get("note", ""))
        for paper in PAPERS
        for c in _paper(paper)["claims"]
    )


def table(name: str) -> PrintedTable:
    if name not in tables():
        raise DataError(f"no published table {name!r}.{nearest(name, tables())}")
    return tables()[name]


def margin(metric: str, value: float) -> float:
    """Smallest difference that matters for a metric, in its own units: inside it two results agree.

    One percentage point for accuracies and average precision, a tenth for run times, and 50 of the 1000 points an
    episode of the control suite can give.
    """
    if "%" in metric or "percent" in metric or "accuracy" in metric:
        return 1.0
    if "seconds" in metric:
        return 0.1 * abs(value)
    if "score" in metric:
        return 50.0
    raise DataError(f"no margin of agreement is known for the metric {metric!r}")


def compare(cell: PrintedCell, n: int | None, ours: Summary, metric: str, is_same_protocol: bool) -> Comparison | None:
    """Our sample beside a printed cell: difference (ours - printed), 95 % interval, verdict; None for an empty cell.

    The interval is Welch's where both sides have a spread and at least two trials. Where only one side has a spread,
    the other number counts as one more trial of the same spread. Equal values for every seed, as a coarse metric gives
    by chance, are no spread to judge by: there is no interval then, unless the other side has one.

    It `agrees` if the interval lies inside the margin, `differs` if it excludes 0 (and leaves the margin), and cannot
    be decided otherwise; then `seeds` says how many per arm would show a difference of the size of the margin with
    80 % power.
    """
    if cell.mean is None:
        return None
    difference, low, high, basis, spread = ours.mean - cell.mean, nan, nan, "no spread on either side", nan
    theirs_has_spread = cell.std is not None and n is not None and n > 1
    if ours.n > 1 and theirs_has_spread:
        assert cell.std is not None
        assert n is not None
        test = welch(ours.mean, ours.std, ours.n, cell.mean, cell.std, n)
        low, high, basis, spread = test.low, test.high, "Welch", pooled_std(ours.std, cell.std)
    elif ours.n > 1:
        test = against_single_value(ours.mean, ours.std, ours.n, cell.mean)
        low, high, basis, spread = test.low, test.high, "printed number taken as one trial of our spread", ours.std
    elif theirs_has_spread:
        assert cell.std is not None
        assert n is not None
        test = against_single_value(cell.mean, cell.std, n, ours.mean)
        low, high, basis, spread = -test.high, -test.low, "our run taken as one trial of the printed spread", cell.std
    width = margin(metric, cell.mean)
    if isfinite(low) and high - low <= 1e-9 * abs(cell.mean):
        low, high, basis, spread = nan, nan, "every seed gave the same value", nan
    if not is_same_protocol:
        verdict = NOT_COMPARED
    elif not isfinite(low):
        verdict = UNDECIDED
    elif -width <= low and high <= width:
        verdict = AGREES
    elif low > 0 or high < 0:
        verdict = DIFFERS
    else:
        verdict = UNDECIDED
    seeds = seeds_needed(width, spread) if verdict in (UNDECIDED, NOT_COMPARED) and isfinite(spread) else None
    return Comparison(cell, n, ours, difference, low, high, verdict, basis, seeds)


def protocol_differences(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What our run did otherwise than the paper: one line per entry of `ours` that is not the paper's own."""
    lines = []
    for key, value in ours.items():
        theirs = paper.get(key)
        if theirs != value:
            lines.append(f"{key}: {value} (paper: {'not stated' if theirs is None else theirs})")
    return lines


@cache
def _paper(short: str) -> dict[str, Any]:
    text = files("dipole.benchmarks").joinpath("published", f"{short}.json").read_text(encoding="utf-8")
    return json.loads(text)


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
