"""The papers' statements, evaluated one by one on any grid of numbers: the printed tables or our own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from math import isfinite, nan
from typing import Any, Protocol

from dipole.benchmarks.equivalence import LIMIT, NOTHING, Evidence, any_of, every
from dipole.benchmarks.report import published
from dipole.benchmarks.report.comparison import AGREES, DIFFERS, UNDECIDED
from dipole.benchmarks.report.published import Claim, row_label
from dipole.benchmarks.report.readings import LEVEL
from dipole.benchmarks.report.table import number
from dipole.benchmarks.report.verdicts import Contrast, Item, Judged, Part, Side, decide, default_part, judge
from dipole.benchmarks.statistics import Summary, seeds_needed, summarize
from dipole.core.utils.errors import DataError

NO_DATA, NO_TEST = "no data", "no machine-readable test"


class Grid(Protocol):
    """Rows by label, columns by name; `samples` are values by seed where there are any.

    A printed table has none: its spread is `value(row, column, "std")`, over `trials` where it says how many.
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
        """Whether there is a spread to judge any of it by."""
        return any(item.is_tested for item in self.items)

    @property
    def evidence(self) -> Evidence:
        """All parts are true: the intersection-union test."""
        return every([part.evidence for part in self.parts]) if self.parts else NOTHING

    @property
    def p(self) -> float:
        """Two-sided p-value of the claim; nan where nothing can be tested."""
        return self.evidence.p if self.is_tested else nan

    @property
    def verdict(self) -> str:
        """Agrees if every part is shown to be true, differs if one is shown to be false, at 0.05; else undecided."""
        return self.verdict_at(self.p)

    def verdict_at(self, p: float) -> str:
        """The verdict where the claim is one of several.

        Args:
            p: of the claim among them, two-sided.
        """
        if not self.claim.tests:
            return NO_TEST
        return decide(self.evidence, p) if self.items else NO_DATA

    @property
    def says(self) -> str:
        """The kind and the bound of every part."""
        said = [(each.part.kind, each.words) for each in self.parts]
        return "; ".join(dict.fromkeys(words if words.startswith(kind) else f"{kind}: {words}" for kind, words in said))

    @property
    def deciding(self) -> Item | None:
        """The comparison that the verdict hangs on."""
        known = [part for part in self.parts if part.deciding is not None]
        if not known:
            return None
        if not self.evidence.is_for and self.evidence.outside < 1:
            return min(known, key=lambda part: part.evidence.outside).deciding
        return max(known, key=lambda part: part.evidence.inside).deciding

    def why(self, verdict: str) -> str:
        """What the verdict rests on, or what it would take.

        Args:
            verdict: as `verdict_at` gives it.
        """
        if not self.claim.tests:
            return self.claim.not_tested
        if self.deciding is None:
            return ""
        if verdict in (AGREES, DIFFERS):
            return f"{'weakest' if verdict == AGREES and len(self.items) > 1 else 'by'} {self.deciding.words}"
        missing = sum(part.missing for part in self.parts)
        reasons = [f"{missing} comparison{'s' if missing > 1 else ''} without data"] if missing else []
        open_ones = list(self._open)
        seeds = max((n for item in open_ones if (n := item.seeds)), default=None)
        if not self.is_tested:
            reasons.append(
                "no spread to judge by (one seed each decides nothing); "
                f"{seeds_needed(1.0, 1.0, is_paired=True)} seeds would tell what is off its bound by one spread"
            )
        elif self.p < LEVEL:
            reasons.append(f"shown by itself (p = {number(self.p)}), but not among all claims of the suite")
        elif seeds:
            reasons.append(f"{seeds} seeds would tell" if seeds <= LIMIT else f"more than {LIMIT} seeds would tell")
        elif any(item.is_on_bound for item in open_ones):
            reasons.append("on its bound, which no number of seeds decides")
        elif not missing:
            reasons.append("its comparisons are decided one by one, and not all of them together")
        return f"{self.deciding.words}; {'; '.join(reasons)}"

    @property
    def _open(self) -> Iterator[Item]:
        """What is not decided, each by itself: the mean where a part is about it, or the comparisons."""
        for part in self.parts:
            if part.item and decide(part.item.evidence, part.item.evidence.p) == UNDECIDED:
                yield part.item
            elif decide(part.evidence, part.evidence.p) == UNDECIDED:
                open_ones = [each for each in part.items if decide(each.evidence, each.evidence.p) == UNDECIDED]
                yield from open_ones or part.items


def evaluate(claim: Claim, grids: Mapping[str, Grid]) -> Outcome:
    """Judge every part of a claim on the grids given by table id; a table that is absent counts as missing."""
    parts = claim.parts or tuple(
        default_part(test).model_copy(update={"tests": (i,)}) for i, test in enumerate(claim.tests)
    )
    judged, missing = [], 0
    for part in parts:
        found = [each for i in part.tests or range(len(claim.tests)) for each in _found(claim, i, part, grids)]
        judged.append(judge(part, [contrast for contrast, is_printed in found if contrast or is_printed]))
        missing += sum(contrast is None for contrast, _ in found)
    return Outcome(claim, tuple(item for each in judged for item in each.items), missing, tuple(judged))


Found = Iterator[tuple[str, Contrast | None]]
Place = tuple[Grid | None, str, str]


def _found(claim: Claim, index: int, part: Part, grids: Mapping[str, Grid]) -> Iterator[tuple[Contrast | None, bool]]:
    """Comparisons of a test, and whether the paper has them: a dash in its table is no comparison."""
    test = claim.tests[index]
    if test["kind"] not in _TESTS:
        known = ", ".join(_TESTS)
        raise DataError(f"claim {claim.id} has a test of unknown kind {test['kind']!r}; known: {known}")
    contrasts = _TESTS[test["kind"]]
    tables = published.tables()
    dashes: set[str] = set()
    if test["table"] in tables:
        dashes = {label for label, contrast in contrasts(test, tables) if contrast is None}
    for label, contrast in contrasts(test, grids):
        if part.is_about(label) or (contrast is None and test["table"] not in grids):
            named = replace(contrast, subject=_subject(test)) if contrast and len(claim.tests) > 1 else contrast
            yield named, label not in dashes


def _compare(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    others = test["b"] if isinstance(test["b"], list) else [test["b"]]
    kind = test.get("field", "mean")
    more = {"direction": -1 if test["op"] == "<" else 1, "is_closed": test["op"] == ">="}
    for other in others:
        for column in _columns(test, grid):
            label = f"{_row(other)} | {column}" if isinstance(test["b"], list) else column
            yield label, _contrast(label, (grid, _row(test["a"]), column), (grid, _row(other), column), kind, **more)


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
    grid = grids.get(test["table"])
    columns = grid.columns if grid else ()
    if not columns:
        yield "all columns", None
    for before, after in pairwise(columns):
        label, row = f"{before} to {after}", _row(test["a"])
        yield label, _contrast(label, (grid, row, after), (grid, row, before))


def _set_above(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """Every row of a above every row of b: the value is the gap between the lowest and the highest."""
    grid = grids.get(test["table"])
    for column in _columns(test, grid):
        sides = [[_side((grid, row, column)) for row in test[name]] for name in ("a", "b")]
        above, below = ([side for side in found if side is not None] for found in sides)
        if len(above) < len(sides[0]) or len(below) < len(sides[1]):
            yield column, None
            continue
        gap = min(side.summary.mean for side in above) - max(side.summary.mean for side in below)
        names = [f"{_row(one)} against {_row(other)}" for one, other in product(test["a"], test["b"])]
        yield column, Contrast(column, gap, list(product(above, below)), names=names)


def _spread(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """Largest less smallest of all cells: below a bound where every two are closer to each other."""
    grid = grids.get(test["table"])
    places = [(row.label, column) for row in grid.rows for column in grid.columns] if grid else []
    sides = {f"{row}, {column}": _side((grid, row, column)) for row, column in places}
    known = sorted(((s, name) for name, s in sides.items() if s is not None), key=lambda each: each[0].summary.mean)
    if len(known) < max(2, len(sides)):
        yield "max - min", None
        return
    spread = known[-1][0].summary.mean - known[0][0].summary.mean
    pairs = [(one, other) for other, one in combinations(known, 2)]
    names = [f"{one} against {other}" for (_, one), (_, other) in pairs]
    yield "max - min", Contrast("max - min", spread, [(one, other) for (one, _), (other, _) in pairs], names=names)


def _column_difference(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    grid = grids.get(test["table"])
    for row, printed in test["published"]["difference"].items():
        places = (grid, row, test["column_a"]), (grid, row, test["column_b"])
        yield row, _contrast(row, *places, printed=printed)


def _best_minus_column(test: Mapping[str, Any], grids: Mapping[str, Grid]) -> Found:
    """One of the other columns is above this one: the value is the gap to the best."""
    grid = grids.get(test["table"])
    for row in test["published"]["difference"]:
        sides = {column: _side((grid, row, column)) for column in grid.columns} if grid else {}
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
    return name if isinstance(name, str) else row_label(name["method"], name.get("group"))


def _subject(test: Mapping[str, Any]) -> str:
    """The rows of a test, as far as its labels do not name them."""
    if not isinstance(test.get("a"), str | Mapping):
        return ""
    return _row(test["a"]) + (f" against {_row(test['b'])}" if isinstance(test.get("b"), str | Mapping) else "")


def _columns(test: Mapping[str, Any], grid: Grid | None) -> Sequence[str]:
    if test["columns"] != "all":
        return test["columns"]
    return grid.columns if grid else ("all columns",)


def _contrast(label: str, one: Place, other: Place, kind: str = "mean", **more: Any) -> Contrast | None:
    first, second = _side(one, kind), _side(other, kind)
    if first is None or second is None:
        return None
    value = first.summary.std - second.summary.std if kind == "std" else first.summary.mean - second.summary.mean
    # A spread that is not printed is no comparison; that of a single seed is one that decides nothing.
    is_known = isfinite(value) or bool(first.samples and second.samples)
    return Contrast(label, value, [(first, second)], **more) if is_known else None


def _side(place: Place, kind: str = "mean") -> Side | None:
    """A cell with what is known of its spread; the spread itself is compared by the values it is of."""
    grid, row, column = place
    if grid is None:
        return None
    of = "mean" if kind == "std" else kind
    if samples := grid.samples(row, column, of):
        return Side(samples, summarize(list(samples.values())))
    mean = grid.value(row, column, of)
    if mean is None:
        return None
    std, trials = grid.value(row, column, "std") if of == "mean" else None, getattr(grid, "trials", None)
    return Side(None, Summary(trials or 1, mean, nan if std is None else std, nan, nan))
