"""The papers' statements, evaluated one by one on any grid of numbers: the printed tables or our own.

A claim has tests, which name rows and columns of tables. A test yields comparisons (`Contrast`), and the parts of the
claim say what has to hold for them (`verdicts.judge_part`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import exp, inf, isfinite, nan
from typing import Any, Protocol

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.claim_specs import LEVEL, Part, fits
from dipole.benchmarks.claims.equivalence import Evidence, any_of, every
from dipole.benchmarks.claims.published import Claim, row_label
from dipole.benchmarks.claims.verdicts import (
    AGREES,
    DIFFERS,
    NO_ROOM,
    NOT_COMPARED,
    NOT_DECIDABLE,
    NOT_LEARNT,
    UNDECIDED,
    Contrast,
    Item,
    JudgedPart,
    Side,
    decide,
    default_part,
    judge_part,
)
from dipole.benchmarks.statistics import Summary, holm, number, seeds_needed, summarize
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

NO_DATA, NO_TEST = "no data", "no machine-readable test"
WHY_NOT = {
    NO_ROOM: "The printed effect does not fit between our base and the bound of the metric",
    NOT_LEARNT: "Our base is not above the untrained level",
}


def bounds_of(metric: str) -> tuple[tuple[float, float], int]:
    """Return the range of a printed metric, and -1 if smaller values are better, else 1."""
    if "seconds" in metric:
        return (0.0, inf), -1
    if "score" in metric:
        return (0.0, 1000.0), 1
    return (0.0, 100.0), 1


class Grid(Protocol):
    """Rows by label, columns by name. `samples` are values by seed if there are any, "untrained" those before training.

    A printed table has none: its spread is `value(row, column, "std")`, over `trials` if it says how many.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> Sequence[Any]: ...

    def value(self, row: str, column: str, kind: str = "mean") -> float | None: ...

    def samples(self, row: str, column: str, kind: str = "mean") -> Mapping[int, float] | None: ...


@dataclass(frozen=True)
class JudgedClaim:
    """A claim on one set of grids: how each part of it was judged, and how many comparisons have no data."""

    claim: Claim
    missing: int
    parts: tuple[JudgedPart, ...]

    @property
    def items(self) -> tuple[Item, ...]:
        """The comparisons of all parts."""
        return tuple(item for part in self.parts for item in part.items)

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
        return self.evidence.p if self.is_tested else nan

    @property
    def verdict(self) -> str:
        """The verdict of the claim alone, at 0.05."""
        return self.verdict_at(self.p)

    def verdict_at(self, p: float) -> str:
        """Return the verdict of the claim at a two-sided p-value, corrected for several claims."""
        if not self.claim.tests:
            return NO_TEST
        if not self.items:
            return NO_DATA
        if self.deciding is not None and self.deciding.obstacle:
            return self.deciding.obstacle
        return decide(self.evidence, p)

    @property
    def says(self) -> str:
        """The kind and the bound of every part."""
        words = []
        for each in self.parts:
            words.append(each.words)
            if not each.words.startswith(each.part.kind):
                words[-1] = f"{each.part.kind}: {each.words}"
        return "; ".join(dict.fromkeys(words))

    @property
    def deciding(self) -> Item | None:
        """The comparison that decides the verdict."""
        known = [part for part in self.parts if part.deciding is not None]
        if not known:
            return None
        evidence = self.evidence
        if evidence.is_for or evidence.outside == 1:
            return max(known, key=lambda part: part.evidence.inside).deciding
        return min(known, key=lambda part: part.evidence.outside).deciding

    def why(self, verdict: str) -> str:
        """Return the reason for a verdict (of `verdict_at`), or what is missing for one."""
        if not self.claim.tests:
            return self.claim.not_tested
        found = self.deciding
        if found is None:
            return ""
        if verdict == AGREES and len(self.items) > 1:
            return f"weakest {found.words}"
        if verdict in (AGREES, DIFFERS):
            return f"by {found.words}"
        if verdict in WHY_NOT:
            return f"{found.words}. {WHY_NOT[verdict]}"
        return ". ".join(filter(None, [found.words, *self._why_undecided()]))

    def _why_undecided(self) -> tuple[str, str]:
        """Return what is missing, and which distance the seeds can show."""
        without = ""
        if missing := sum(part.missing for part in self.parts):
            without = f"{counted(missing, 'comparison')} without data"
        if not self.is_tested:
            seeds = seeds_needed(1.0, 1.0, is_paired=True)
            return without, (
                "One seed each gives no spread to test with. "
                f"{seeds} seeds would show a distance of one spread from the bound"
            )
        if self.p < LEVEL:
            return without, f"Significant alone (p = {number(self.p)}), but not among all claims of the suite"
        open_items = list(self._undecided_items())
        if any(item.is_on_bound for item in open_items):
            return without, "The estimate is on its bound, so no number of seeds decides it"
        known = [item for item in open_items if isfinite(item.reach)]
        if not known:
            return without, ""
        least = max(known, key=lambda item: item.reach)
        if least.is_log:
            return without, f"These seeds show a factor of {number(exp(least.reach))} from the bound or more"
        return without, f"These seeds show a distance of {number(least.reach)} from the bound or more"

    def _undecided_items(self) -> Iterator[Item]:
        """Yield the undecided means and comparisons."""
        for part in self.parts:
            if part.mean and part.mean.verdict == UNDECIDED:
                yield part.mean
            elif decide(part.evidence, part.evidence.p) == UNDECIDED:
                undecided = [item for item in part.items if item.verdict == UNDECIDED]
                # Where all are decided, those without data are missing, or the tests together fall short.
                yield from undecided or (() if part.missing else part.items)


@dataclass(frozen=True)
class Claimed:
    """A claim on the printed numbers and on ours. `p_holm` is of ours among all claims that the suite can test.

    `not_decidable` says why the suite cannot decide anything. Its claims have no p-value then.
    """

    printed: JudgedClaim
    ours: JudgedClaim
    is_paper_protocol: bool
    p_holm: float
    not_decidable: str = ""

    @property
    def verdict_alone(self) -> str:
        """The verdict on our numbers, as one claim of several."""
        if self.not_decidable and self.ours.claim.tests:
            return NOT_DECIDABLE
        return self.ours.verdict_at(self.p_holm)

    @property
    def verdict(self) -> str:
        """The verdict on our numbers, and whether they are by another protocol."""
        if self.is_paper_protocol or self.verdict_alone in (NO_DATA, NO_TEST, NOT_DECIDABLE):
            return self.verdict_alone
        return f"{self.verdict_alone} ({NOT_COMPARED})"

    @property
    def why(self) -> str:
        """The reason for the verdict, or what its seeds can show."""
        if self.verdict_alone == NOT_DECIDABLE:
            return self.not_decidable
        return self.ours.why(self.verdict_alone)


def judged_claims(
    claims: Sequence[Claim], ours: Mapping[str, Grid], by_protocol: Collection[str], not_decidable: str = ""
) -> list[Claimed]:
    """Return the claims on the printed numbers and on ours.

    Args:
        claims: of one paper.
        ours: a grid for each table's id, as far as we have it.
        by_protocol: ids of the tables that we filled by the paper's protocol.
        not_decidable: why the suite cannot decide anything, or "".
    """
    outcomes = [judge_claim(claim, ours) for claim in claims]
    printed = [judge_claim(claim, published.tables()) for claim in claims]
    is_paper = [all(name in by_protocol for name in claim.tables if name in ours) for claim in claims]
    adjusted = holm([nan if not_decidable else outcome.p for outcome in outcomes])
    return [Claimed(*each, not_decidable) for each in zip(printed, outcomes, is_paper, adjusted, strict=True)]


def judge_claim(claim: Claim, grids: Mapping[str, Grid]) -> JudgedClaim:
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
        judged.append(judge_part(part, contrasts))
    return JudgedClaim(claim, missing, tuple(judged))


Found = Iterator[tuple[str, Contrast | None]]
Test = Mapping[str, Any]
Grids = Mapping[str, Grid]
Place = tuple[Grid | None, str, str]


def _comparisons(claim: Claim, index: int, part: Part, grids: Grids) -> Iterator[tuple[Contrast | None, bool]]:
    """Yield the comparisons of a test that the part is about, and whether the paper prints them."""
    test, tables = claim.tests[index], published.tables()
    if test["kind"] not in _TESTS:
        known = ", ".join(_TESTS)
        raise DataError(f"claim {claim.id} has a test of unknown kind {test['kind']!r}; known: {known}")
    printed: list[tuple[str, Contrast | None]] = []
    if test["table"] in tables:
        printed = list(_TESTS[test["kind"]](test, tables))
    not_printed = {label for label, contrast in printed if contrast is None}
    effects = {label: contrast.value for label, contrast in printed if contrast is not None}
    found = printed if grids is tables else _TESTS[test["kind"]](test, grids)
    for label, contrast in found:
        if fits(label, part.only) or (contrast is None and test["table"] not in grids):
            if contrast and test["table"] in tables and test.get("field", "mean") == "mean":
                bounds, sign = bounds_of(tables[test["table"]].metric)
                contrast = replace(contrast, effect=effects.get(label, nan), bounds=bounds, sign=sign)
            if contrast and len(claim.tests) > 1:
                contrast = replace(contrast, subject=_subject(test))
            yield contrast, label not in not_printed


def _compare(test: Test, grids: Grids) -> Found:
    grid, kind = grids.get(test["table"]), test.get("field", "mean")
    direction, is_closed = {"<": -1}.get(test["op"], 1), test["op"] == ">="
    others, several = test["b"], isinstance(test["b"], list)
    if not several:
        others = [others]
    for other, column in product(others, _columns(test, grid)):
        label = f"{_row(other)} | {column}" if several else column
        places = (grid, _row(test["a"]), column), (grid, _row(other), column)
        yield label, _contrast(label, *places, kind, direction=direction, is_closed=is_closed)


def _difference(test: Test, grids: Grids) -> Found:
    grid, grid_b = grids.get(test["table"]), grids.get(test.get("table_b", test["table"]))
    for column in _columns(test, grid):
        other = grid_b, _row(test["b"]), test.get("columns_b", {}).get(column, column)
        printed = test["published"]["difference"][column]
        yield column, _contrast(column, (grid, _row(test["a"]), column), other, printed=printed)


def _ratio(test: Test, grids: Grids) -> Found:
    grid = grids.get(test["table"])
    for column in _columns(test, grid):
        found = _contrast(column, (grid, _row(test["a"]), column), (grid, _row(test["b"]), column))
        if found is not None:
            one, other = (side.summary.mean for side in found.pairs[0])
            if min(one, other) > 0:
                printed = test["published"]["ratio"][column] - 1
                found = replace(found, value=one / other, printed=printed, is_log=True)
            else:
                found = None
        yield column, found


def _along_columns(test: Test, grids: Grids) -> Found:
    """Compare each column with the one before it."""
    grid, row = grids.get(test["table"]), _row(test["a"])
    if grid is None:
        yield "all columns", None
        return
    for before, after in pairwise(grid.columns):
        label = f"{before} to {after}"
        yield label, _contrast(label, (grid, row, after), (grid, row, before))


def _set_above(test: Test, grids: Grids) -> Found:
    """Compare every row of a with every row of b. The value is the lowest of a minus the highest of b."""
    grid = grids.get(test["table"])
    names = [f"{_row(one)} against {_row(other)}" for one, other in product(test["a"], test["b"])]
    for column in _columns(test, grid):
        above, below = (_known(_side((grid, row, column)) for row in test[name]) for name in ("a", "b"))
        found = None
        if len(above) == len(test["a"]) and len(below) == len(test["b"]):
            gap = min(side.summary.mean for side in above) - max(side.summary.mean for side in below)
            found = Contrast(column, gap, list(product(above, below)), names=names)
        yield column, found


def _spread(test: Test, grids: Grids) -> Found:
    """Compare all cells in pairs. The value is the largest minus the smallest."""
    grid, found = grids.get(test["table"]), None
    if grid is not None:
        places = [(row.label, column) for row in grid.rows for column in grid.columns]
        sides = {f"{row}, {column}": _side((grid, row, column)) for row, column in places}
        known = sorted(((s, name) for name, s in sides.items() if s is not None), key=lambda each: each[0].summary.mean)
        if len(known) >= max(2, len(sides)):
            pairs = [(one, other) for (other, _), (one, _) in combinations(known, 2)]
            names = [f"{one} against {other}" for (_, other), (_, one) in combinations(known, 2)]
            value = known[-1][0].summary.mean - known[0][0].summary.mean
            found = Contrast("max - min", value, pairs, names=names)
    yield "max - min", found


def _column_difference(test: Test, grids: Grids) -> Found:
    grid = grids.get(test["table"])
    for row, printed in test["published"]["difference"].items():
        places = (grid, row, test["column_a"]), (grid, row, test["column_b"])
        yield row, _contrast(row, *places, printed=printed)


def _best_minus_column(test: Test, grids: Grids) -> Found:
    """Compare a column with all others. The value is the gap to the best of them."""
    grid = grids.get(test["table"])
    for row in test["published"]["difference"]:
        sides = {column: _side((grid, row, column)) for column in getattr(grid, "columns", ())}
        base, found = sides.pop(test["column"], None), None
        others = {name: side for name, side in sides.items() if side is not None}
        if base is not None and others:
            gap = max(0.0, *(side.summary.mean - base.summary.mean for side in others.values()))
            names = [f"{name} against {test['column']}" for name in others]
            found = Contrast(row, gap, [(side, base) for side in others.values()], any_of, names=names)
        yield row, found


_TESTS: Mapping[str, Callable[[Test, Grids], Found]] = {
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


def _subject(test: Test) -> str:
    """Return the rows of a test that its labels do not name."""
    named = [_row(test[name]) for name in ("a", "b") if isinstance(test.get(name), str | Mapping)]
    if not isinstance(test.get("a"), str | Mapping):
        return ""
    return " against ".join(named)


def _columns(test: Test, grid: Grid | None) -> Sequence[str]:
    return test["columns"] if test["columns"] != "all" else getattr(grid, "columns", ("all columns",))


def _known(sides: Iterator[Side | None]) -> list[Side]:
    return [side for side in sides if side is not None]


def _contrast(label: str, one: Place, other: Place, kind: str = "mean", **more: Any) -> Contrast | None:
    first, second = _side(one, kind), _side(other, kind)
    if first is None or second is None:
        return None
    value = first.summary.mean - second.summary.mean
    if kind == "std":
        value = first.summary.std - second.summary.std
    # A spread that is not printed is no comparison. The spread of a single seed is one that decides nothing.
    if not isfinite(value) and not (first.samples and second.samples):
        return None
    return Contrast(label, value, [(first, second)], **more)


def _side(place: Place, kind: str = "mean") -> Side | None:
    """Return a cell with its spread. Spreads are compared through the values they come from."""
    grid, row, column = place
    of = kind.replace("std", "mean")
    if grid is None:
        return None
    if samples := grid.samples(row, column, of):
        untrained = grid.samples(row, column, "untrained") if of == "mean" else None
        return Side(samples, summarize(list(samples.values())), untrained)
    mean, std = grid.value(row, column, of), None
    if mean is None:
        return None
    if of == "mean":
        std = grid.value(row, column, "std")
    if std is None:
        std = nan
    return Side(None, Summary(getattr(grid, "trials", None) or 1, mean, std, nan, nan))
