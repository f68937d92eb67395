"""The papers' statements, evaluated one by one on any grid of numbers: the printed tables or our own.

A claim has tests, which name rows and columns of tables. A test yields comparisons (`Contrast`), and the parts of the
claim say what has to hold for them (`verdicts.judge`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from math import isfinite, nan
from typing import Any, Protocol

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.claim_specs import LEVEL, Part, fits
from dipole.benchmarks.claims.equivalence import LIMIT, Evidence, any_of, every
from dipole.benchmarks.claims.published import Claim, row_label
from dipole.benchmarks.claims.verdicts import (
    AGREES,
    DIFFERS,
    UNDECIDED,
    Contrast,
    Item,
    Judged,
    Side,
    decide,
    default_part,
    judge,
)
from dipole.benchmarks.report.table import number
from dipole.benchmarks.statistics import Summary, seeds_needed, summarize
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

NO_DATA, NO_TEST = "no data", "no machine-readable test"


class Grid(Protocol):
    """Rows by label, columns by name. `samples` are values by seed if there are any.

    A printed table has none: its spread is `value(row, column, "std")`, over `trials` if it says how many.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> Sequence[Any]: ...

    def value(self, row: str, column: str, kind: str = "mean") -> float | None: ...

    def samples(self, row: str, column: str, kind: str = "mean") -> Mapping[int, float] | None: ...


@dataclass(frozen=True)
class Outcome:
    """A claim on one set of grids.

    Args:
        claim: the statement.
        items: its comparisons.
        missing: comparisons without data.
        parts: how each part of it was judged.
    """

    claim: Claim
    items: tuple[Item, ...]
    missing: int
    parts: tuple[Judged, ...] = field(default=())

    @property
    def hold(self) -> int:
        """How many comparisons are as claimed."""
        return sum(item.holds for item in self.items)

    @property
    def is_tested(self) -> bool:
        """True if a comparison has a spread to judge by."""
        return any(item.is_tested for item in self.items)

    @property
    def evidence(self) -> Evidence:
        """Evidence that all parts are true (intersection-union test)."""
        return every([part.evidence for part in self.parts])

    @property
    def p(self) -> float:
        """Two-sided p-value of the claim, or nan if nothing can be tested."""
        if self.is_tested:
            return self.evidence.p
        return nan

    @property
    def verdict(self) -> str:
        """The verdict of the claim alone, at 0.05."""
        return self.verdict_at(self.p)

    def verdict_at(self, p: float) -> str:
        """Return the verdict of the claim at a p-value.

        Args:
            p: two-sided p-value of the claim, corrected for several claims.
        """
        if not self.claim.tests:
            return NO_TEST
        if not self.items:
            return NO_DATA
        return decide(self.evidence, p)

    @property
    def says(self) -> str:
        """The kind and the bound of every part."""
        words = []
        for each in self.parts:
            text = each.words
            if not text.startswith(each.part.kind):
                text = f"{each.part.kind}: {text}"
            words.append(text)
        return "; ".join(dict.fromkeys(words))

    @property
    def deciding(self) -> Item | None:
        """The comparison that decides the verdict."""
        known = [part for part in self.parts if part.deciding is not None]
        if not known:
            return None
        if self.evidence.is_for or self.evidence.outside == 1:
            return max(known, key=lambda part: part.evidence.inside).deciding
        return min(known, key=lambda part: part.evidence.outside).deciding

    def why(self, verdict: str) -> str:
        """Return the reason for a verdict, or what is missing for one.

        Args:
            verdict: a result of `verdict_at`.
        """
        if not self.claim.tests:
            return self.claim.not_tested
        if self.deciding is None:
            return ""
        if verdict == AGREES and len(self.items) > 1:
            return f"weakest {self.deciding.words}"
        if verdict in (AGREES, DIFFERS):
            return f"by {self.deciding.words}"
        return ". ".join([self.deciding.words, *self._why_undecided()])

    def _why_undecided(self) -> Iterator[str]:
        missing = sum(part.missing for part in self.parts)
        if missing:
            yield f"{counted(missing, 'comparison')} without data"
        open_items = list(self._undecided_items())
        seeds = max((item.seeds for item in open_items if item.seeds), default=None)
        if not self.is_tested:
            yield (
                "One seed each gives no spread to test with. "
                f"{seeds_needed(1.0, 1.0, is_paired=True)} seeds would show a distance of one spread from the bound"
            )
        elif self.p < LEVEL:
            yield f"Significant alone (p = {number(self.p)}), but not among all claims of the suite"
        elif seeds:
            if seeds > LIMIT:
                yield f"More than {LIMIT} seeds would be needed"
            else:
                yield f"{seeds} seeds would decide it"
        elif any(item.is_on_bound for item in open_items):
            yield "The estimate is on its bound, so no number of seeds decides it"
        elif not missing:
            yield "Each comparison has a verdict, but together they have none"

    def _undecided_items(self) -> Iterator[Item]:
        """Yield the undecided means and comparisons."""
        for part in self.parts:
            if part.mean and part.mean.verdict == UNDECIDED:
                yield part.mean
            elif decide(part.evidence, part.evidence.p) == UNDECIDED:
                yield from [item for item in part.items if item.verdict == UNDECIDED] or part.items


def evaluate(claim: Claim, grids: Mapping[str, Grid]) -> Outcome:
    """Judge every part of a claim on the grids by table id. Comparisons of an absent table count as missing."""
    parts = claim.parts or tuple(
        default_part(test).model_copy(update={"tests": (i,)}) for i, test in enumerate(claim.tests)
    )
    judged, missing = [], 0
    for part in parts:
        contrasts: list[Contrast | None] = []
        for index in part.tests or range(len(claim.tests)):
            for contrast, is_printed in _comparisons(claim, index, part, grids):
                missing += contrast is None
                # A dash in the paper's own table is no comparison.
                if contrast or is_printed:
                    contrasts.append(contrast)
        judged.append(judge(part, contrasts))
    return Outcome(claim, tuple(item for each in judged for item in each.items), missing, tuple(judged))


Found = Iterator[tuple[str, Contrast | None]]
Place = tuple[Grid | None, str, str]


def _comparisons(
    claim: Claim, index: int, part: Part, grids: Mapping[str, Grid]
) -> Iterator[tuple[Contrast | None, bool]]:
    """Yield the comparisons of a test that the part is about, and whether the paper prints them."""
    test = claim.tests[index]
    if test["kind"] not in _TESTS:
        known = ", ".join(_TESTS)
        raise DataError(f"claim {claim.id} has a test of unknown kind {test['kind']!r}; known: {known}")
    contrasts = _TESTS[test["kind"]]
    tables = published.tables()
    not_printed: set[str] = set()
    if test["table"] in tables:
        not_printed = {label for label, contrast in contrasts(test, tables) if contrast is None}
    for label, contrast in contrasts(test, grids):
        if fits(label, part.only) or (contrast is None and test["table"] not in grids):
            if contrast and len(claim.tests) > 1:
                contrast = replace(contrast, subject=_subject(test))
            yield contrast, label not in not_printed


def _compare(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    kind = test.get("field", "mean")
    direction, is_closed = {"<": -1}.get(test["op"], 1), test["op"] == ">="
    others, several = test["b"], isinstance(test["b"], list)
    if not several:
        others = [others]
    for other in others:
        for column in _columns(test, grid):
            label = column
            if several:
                label = f"{_row(other)} | {column}"
            places = (grid, _row(test["a"]), column), (grid, _row(other), column)
            yield label, _contrast(label, *places, kind, direction=direction, is_closed=is_closed)


def _difference(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid, grid_b = grids.get(test["table"]), grids.get(test.get("table_b", test["table"]))
    for column in _columns(test, grid):
        column_b = test.get("columns_b", {}).get(column, column)
        printed = test["published"]["difference"][column]
        places = (grid, _row(test["a"]), column), (grid_b, _row(test["b"]), column_b)
        yield column, _contrast(column, *places, printed=printed)


def _ratio(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for column in _columns(test, grid):
        one, other = _side((grid, _row(test["a"]), column)), _side((grid, _row(test["b"]), column))
        if one is None or other is None or min(one.summary.mean, other.summary.mean) <= 0:
            yield column, None
            continue
        printed = test["published"]["ratio"][column] - 1
        value = one.summary.mean / other.summary.mean
        yield column, Contrast(column, value, [(one, other)], printed=printed, is_log=True)


def _along_columns(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """Compare each column with the one before it."""
    grid = grids.get(test["table"])
    if grid is None:
        yield "all columns", None
        return
    for before, after in pairwise(grid.columns):
        label, row = f"{before} to {after}", _row(test["a"])
        yield label, _contrast(label, (grid, row, after), (grid, row, before))


def _set_above(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """Compare every row of a with every row of b. The value is the lowest of a minus the highest of b."""
    grid = grids.get(test["table"])
    for column in _columns(test, grid):
        above, below = (
            [side for row in test[name] if (side := _side((grid, row, column))) is not None] for name in ("a", "b")
        )
        if len(above) < len(test["a"]) or len(below) < len(test["b"]):
            yield column, None
            continue
        gap = min(side.summary.mean for side in above) - max(side.summary.mean for side in below)
        names = [f"{_row(one)} against {_row(other)}" for one, other in product(test["a"], test["b"])]
        yield column, Contrast(column, gap, list(product(above, below)), names=names)


def _spread(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """Compare all cells in pairs. The value is the largest minus the smallest."""
    grid = grids.get(test["table"])
    if grid is None:
        yield "max - min", None
        return
    places = [(row.label, column) for row in grid.rows for column in grid.columns]
    sides = {f"{row}, {column}": _side((grid, row, column)) for row, column in places}
    known = sorted(((s, name) for name, s in sides.items() if s is not None), key=lambda each: each[0].summary.mean)
    if len(known) < max(2, len(sides)):
        yield "max - min", None
        return
    spread = known[-1][0].summary.mean - known[0][0].summary.mean
    pairs, names = [], []
    for (other, other_name), (one, one_name) in combinations(known, 2):
        pairs.append((one, other))
        names.append(f"{one_name} against {other_name}")
    yield "max - min", Contrast("max - min", spread, pairs, names=names)


def _column_difference(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for row, printed in test["published"]["difference"].items():
        places = (grid, row, test["column_a"]), (grid, row, test["column_b"])
        yield row, _contrast(row, *places, printed=printed)


def _best_minus_column(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """Compare a column with all others. The value is the gap to the best of them."""
    grid = grids.get(test["table"])
    for row in test["published"]["difference"]:
        sides = {}
        if grid is not None:
            sides = {column: _side((grid, row, column)) for column in grid.columns}
        base = sides.pop(test["column"], None)
        others = {name: side for name, side in sides.items() if side is not None}
        if base is None or not others:
            yield row, None
            continue
        gap = max(0.0, *(side.summary.mean - base.summary.mean for side in others.values()))
        names = [f"{name} against {test['column']}" for name in others]
        yield row, Contrast(row, gap, [(side, base) for side in others.values()], any_of, names=names)


_TESTS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Grid]], Found]] = {
    "compare": _compare,
    "difference": _difference,
    "ratio": _ratio,
    "along_columns": _along_columns,
    "set_above": _set_above,
    "spread": _spread,
    "column_difference": _column_difference,
    "best_minus_column": _best_minus_column,
}


def _row(name: str | Mapping[str, str]) -> str:
    if isinstance(name, str):
        return name
    return row_label(name["method"], name.get("group"))


def _subject(test: Mapping[str, Any]) -> str:
    """Return the rows of a test that its labels do not name."""
    one, other = test.get("a"), test.get("b")
    if not isinstance(one, str | Mapping):
        return ""
    if isinstance(other, str | Mapping):
        return f"{_row(one)} against {_row(other)}"
    return _row(one)


def _columns(test: Mapping[str, Any], grid: Grid | None) -> Sequence[str]:
    if test["columns"] != "all":
        return test["columns"]
    if grid is None:
        return ("all columns",)
    return grid.columns


def _contrast(label: str, one: Place, other: Place, kind: str = "mean", **more: Any) -> Contrast | None:
    first, second = _side(one, kind), _side(other, kind)
    if first is None or second is None:
        return None
    value = first.summary.mean - second.summary.mean
    if kind == "std":
        value = first.summary.std - second.summary.std
    # A spread that is not printed is no comparison. The spread of a single seed is one that decides nothing.
    is_known = isfinite(value) or bool(first.samples and second.samples)
    return Contrast(label, value, [(first, second)], **more) if is_known else None


def _side(place: Place, kind: str = "mean") -> Side | None:
    """Return a cell with its spread. Spreads are compared through the values they come from."""
    grid, row, column = place
    if grid is None:
        return None
    of = kind.replace("std", "mean")
    if samples := grid.samples(row, column, of):
        return Side(samples, summarize(list(samples.values())))
    mean = grid.value(row, column, of)
    if mean is None:
        return None
    std = None
    if of == "mean":
        std = grid.value(row, column, "std")
    if std is None:
        std = nan
    return Side(None, Summary(getattr(grid, "trials", None) or 1, mean, std, nan, nan))
