"""The papers' statements, evaluated one by one on any grid of numbers: the printed tables or our own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log
from typing import Any, Protocol

from dipole.benchmarks.report.comparison import AGREES, DIFFERS, UNDECIDED
from dipole.benchmarks.report.published import Claim, row_label
from dipole.benchmarks.statistics import holm, paired
from dipole.core.ground.errors import DataError

SIGNIFICANCE = 0.05
NO_DATA, NO_TEST = "no data", "no machine-readable test"


class Grid(Protocol):
    """Rows by label, columns by name; `samples` are values by seed where there are any."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> Sequence[Any]: ...

    def value(self, row: str, column: str, kind: str = "mean") -> float | None: ...

    def samples(self, row: str, column: str, kind: str = "mean") -> Mapping[int, float] | None: ...


@dataclass(frozen=True)
class Item:
    """One comparison of a test: its value (a difference, ratio or gap), whether it is as claimed, and a p-value."""

    label: str
    value: float
    holds: bool
    p: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A claim on one set of grids. `missing` counts comparisons without data."""

    claim: Claim
    items: tuple[Item, ...]
    missing: int

    @property
    def hold(self) -> int:
        return sum(item.holds for item in self.items)

    @property
    def verdict(self) -> str:
        """Agrees if all comparisons are as claimed and one of them significantly so (Holm over the claim); differs if
        one is significantly the other way round; otherwise these numbers cannot decide."""
        if not self.claim.tests:
            return NO_TEST
        if not self.items:
            return NO_DATA
        adjusted = holm([float("nan") if item.p is None else item.p for item in self.items])
        shown = [item for item, p in zip(self.items, adjusted, strict=True) if isfinite(p) and p < SIGNIFICANCE]
        if any(not item.holds for item in shown):
            return DIFFERS
        return AGREES if shown and self.hold == len(self.items) else UNDECIDED


def evaluate(claim: Claim, grids: Mapping[str, Grid]) -> Outcome:
    """Evaluate every test of a claim on the grids given by table id; a table that is absent counts as missing."""
    items: list[Item] = []
    missing = 0
    for test in claim.tests:
        found = list(_KINDS[test["kind"]](test, grids)) if test["kind"] in _KINDS else _unknown(claim, test)
        items += [item for item in found if item is not None]
        missing += sum(item is None for item in found)
    return Outcome(claim, tuple(items), missing)


Found = Iterator[Item | None]
Place = tuple[Grid | None, str, str]


def _unknown(claim: Claim, test: Mapping[str, Any]) -> list[Item | None]:
    raise DataError(f"claim {claim.id} has a test of unknown kind {test['kind']!r}; known: {', '.join(_KINDS)}")


def _compare(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    others = test["b"] if isinstance(test["b"], list) else [test["b"]]
    for other in others:
        for column in _columns(test, grid):
            label = f"{_row(other)} | {column}" if isinstance(test["b"], list) else column
            gap = _minus((grid, _row(test["a"]), column), (grid, _row(other), column), test.get("field", "mean"))
            yield _item(label, gap, _OPERATORS[test["op"]], test.get("min_diff", 0.0))


def _difference(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid, grid_b = grids.get(test["table"]), grids.get(test.get("table_b", test["table"]))
    for column in _columns(test, grid):
        column_b = test.get("columns_b", {}).get(column, column)
        gap = _minus((grid, _row(test["a"]), column), (grid_b, _row(test["b"]), column_b))
        yield _item(column, gap, _same_sign(test["published"]["difference"][column]))


def _ratio(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for column in _columns(test, grid):
        one, other = (grid, _row(test["a"]), column), (grid, _row(test["b"]), column)
        x, y = _value(one), _value(other)
        if x is None or y is None:
            yield None
            continue
        p = _p(_logs(_samples(one)), _logs(_samples(other)))
        yield Item(column, x / y, (x > y) == (test["published"]["ratio"][column] > 1), p)


def _along_columns(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    columns = grid.columns if grid else ()
    if not columns:
        yield None
    for before, after in pairwise(columns):
        gap = _minus((grid, _row(test["a"]), after), (grid, _row(test["a"]), before))
        yield _item(f"{before} to {after}", gap, _OPERATORS[">"])


def _set_above(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for column in _columns(test, grid):
        low = _extreme(grid, test["a"], column, min)
        high = _extreme(grid, test["b"], column, max)
        gap = _minus((grid, low, column), (grid, high, column)) if low and high else None
        yield _item(column, gap, _OPERATORS[">"])


def _spread(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    places = [(row.label, column) for row in grid.rows for column in grid.columns] if grid else []
    values = [grid.value(*place) for place in places] if grid else []
    if not values or any(value is None for value in values):
        yield None
        return
    known = [value for value in values if value is not None]
    spread = max(known) - min(known)
    yield Item("max - min", spread, spread <= test["published"]["spread"] + _ROUNDING)


def _column_difference(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for row, published in test["published"]["difference"].items():
        gap = _minus((grid, row, test["column_a"]), (grid, row, test["column_b"]))
        yield _item(row, gap, _same_sign(published))


def _best_minus_column(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for row in test["published"]["difference"]:
        known = {c: grid.value(row, c) for c in grid.columns} if grid else {}
        present = {c: value for c, value in known.items() if value is not None}
        if len(present) < 2 or test["column"] not in present:
            yield None
            continue
        best = max(present, key=lambda c: present[c])
        yield _item(row, _minus((grid, row, best), (grid, row, test["column"])), _OPERATORS[">"])


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Grid]], Found]] = {
    "compare": _compare,
    "difference": _difference,
    "ratio": _ratio,
    "along_columns": _along_columns,
    "set_above": _set_above,
    "spread": _spread,
    "column_difference": _column_difference,
    "best_minus_column": _best_minus_column,
}
# Printed numbers have at most two decimals; their differences carry rounding noise far below that.
_ROUNDING = 1e-9
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": lambda gap, least: gap > least + _ROUNDING,
    ">=": lambda gap, least: gap >= least - _ROUNDING,
    "<": lambda gap, least: gap < -least - _ROUNDING,
}


def _same_sign(published: float) -> Callable[[float, float], bool]:
    return lambda gap, _: gap * published > 0 or published == 0


def _row(name: str | Mapping[str, str]) -> str:
    return name if isinstance(name, str) else row_label(name["method"], name.get("group"))


def _columns(test: Mapping[str, Any], grid: Grid | None) -> Sequence[str]:
    if test["columns"] != "all":
        return test["columns"]
    return grid.columns if grid else ("all columns",)


def _value(place: Place, kind: str = "mean") -> float | None:
    grid, row, column = place
    return grid.value(row, column, kind) if grid else None


def _samples(place: Place, kind: str = "mean") -> Mapping[int, float] | None:
    grid, row, column = place
    return grid.samples(row, column, kind) if grid else None


def _minus(one: Place, other: Place, kind: str = "mean") -> tuple[float, float | None] | None:
    x, y = _value(one, kind), _value(other, kind)
    if x is None or y is None:
        return None
    return x - y, _p(_samples(one, kind), _samples(other, kind))


def _item(
    label: str, gap: tuple[float, float | None] | None, is_claimed: Callable[[float, float], bool], least: float = 0.0
) -> Item | None:
    return None if gap is None else Item(label, gap[0], is_claimed(gap[0], least), gap[1])


def _extreme(grid: Grid | None, rows: Sequence[str], column: str, pick: Callable[..., str]) -> str | None:
    known = {row: grid.value(row, column) for row in rows} if grid else {}
    if not known or any(value is None for value in known.values()):
        return None
    return pick(known, key=lambda row: known[row])


def _p(one: Mapping[int, float] | None, other: Mapping[int, float] | None) -> float | None:
    if one is None or other is None:
        return None
    p = paired(other, one).p_t
    return p if isfinite(p) else None


def _logs(samples: Mapping[int, float] | None) -> Mapping[int, float] | None:
    return None if samples is None else {seed: log(value) for seed, value in samples.items()}
