"""The comparisons that a claim is about: each test of the claim names rows and columns of a table, printed or ours."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import exp, inf, isfinite, log, nan
from typing import Any, Protocol

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.protocol import ClaimPart, fits
from dipole.benchmarks.claims.published import Claim, row_label
from dipole.benchmarks.claims.verdicts import NO_ROOM, NOT_LEARNT
from dipole.benchmarks.statistics import Summary, summarize
from dipole.benchmarks.statistics.differences import Estimate, of_pairs, of_summaries
from dipole.core.utils.errors import DataError


class NumberTable(Protocol):
    """Rows by label, columns by name, and values by seed if there are any: a printed table has "std" and `trials`."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> Sequence[Any]: ...

    def value(self, row: str, column: str, field: str = "mean") -> float | None: ...

    def samples(self, row: str, column: str, field: str = "mean") -> Mapping[int, float] | None: ...


@dataclass(frozen=True)
class Side:
    """One cell: values by seed if there are any, and mean, standard deviation and n, as far as known."""

    samples: Mapping[int, float] | None
    summary: Summary
    untrained: Mapping[int, float] | None = None  # values of the same seeds before training

    def minus(self, other: "Side") -> Estimate:
        """Return the difference of two sides, by seed if both have values."""
        if self.samples and other.samples:
            return of_pairs(self.samples, other.samples)
        return of_summaries(self.summary, other.summary)

    def is_learnt(self, sign: int) -> bool:
        """Return whether the values are better than before training (95 % interval of the difference), or unknown."""
        if not self.samples or not self.untrained:
            return True
        found = of_pairs(self.samples, self.untrained)
        ends = found.interval() if isfinite(found.error) else (found.value,)
        return min(sign * end for end in ends) > 0

    @property
    def logs(self) -> "Side":
        s, samples = self.summary, {seed: log(value) for seed, value in (self.samples or {}).items()}
        return Side(samples or None, Summary(s.n, log(s.mean), s.std / s.mean, nan, nan))


@dataclass(frozen=True)
class Comparison:
    """One comparison before it is judged: a pair of sides or several, each first minus second."""

    label: str
    value: float  # its difference, ratio or gap
    pairs: Sequence[tuple[Side, Side]]
    one_is_enough: bool = False  # or else all pairs must hold
    direction: int = 1  # -1 if the first side has to be the smaller one
    printed: float | None = None  # the printed difference
    is_log: bool = False  # ratios are compared: the sides are logarithms
    is_closed: bool = False  # the bound itself is as claimed
    subject: str = ""  # the rows, if a claim has several lists of comparisons
    names: Sequence[str] = ()  # of several pairs
    effect: float = nan  # the difference or ratio that the paper's own table has
    bounds: tuple[float, float] = (-inf, inf)  # of the metric
    sign: int = 1  # -1 if smaller values of the metric are better

    def estimates(self) -> list[Estimate]:
        return [one.minus(other) for one, other in self.pairs]

    def turn(self, part: ClaimPart) -> int:
        """Return 1, -1 if the first side has to be the smaller one, or 0 if the printed difference is 0."""
        if part.kind == "sign" and self.printed is not None:
            return (self.printed > 0) - (self.printed < 0)
        return self.direction

    def region(self, part: ClaimPart) -> tuple[float, float]:
        """Return the region of the part in units of first minus second."""
        (low, high), turn = part.region, self.turn(part)
        return {1: (low, high), -1: (-high, -low), 0: (-inf, inf)}[turn]

    def obstacle(self, pair: int, region: tuple[float, float]) -> str:
        """Return NO_ROOM or NOT_LEARNT if a pair cannot show the printed effect, or "".

        The base is the side that the paper's table has as the worse one. The printed effect, added to our base, has to
        stay within the bounds of the metric. So does the margin inside which two sides count as close.
        """
        if not isfinite(self.effect):
            return ""
        amount = self.effect - float(self.is_log)
        base = self.pairs[pair][0 if self.sign * amount < 0 else 1]
        if not base.is_learnt(self.sign):
            return NOT_LEARNT
        level, size, (low, high) = base.summary.mean, abs(amount), self.bounds
        if region[0] < 0 < region[1] < inf:  # the claim is that two sides are close
            size = max(size, region[1])
        reached = level + self.sign * size
        if self.is_log:
            level = exp(level)
            reached = level * max(self.effect, 1 / self.effect) ** self.sign
        if low <= level <= high and not low <= reached <= high:
            return NO_ROOM
        return ""


Test = Mapping[str, Any]
Table = NumberTable | None
Place = tuple[Table, str, str]
Found = Iterator[tuple[str, Comparison | None]]  # labels and their comparisons, None without data


def comparisons(claim: Claim, part: ClaimPart, tables: Mapping[str, NumberTable]) -> Iterator[Comparison | None]:
    """Yield the comparisons of a part of a claim, None without data. Where the paper has a dash, there is none."""
    for index in part.tests or range(len(claim.tests)):
        test, printed_tables = claim.tests[index], published.tables()
        if test["kind"] not in _TESTS:
            known = ", ".join(_TESTS)
            raise DataError(f"claim {claim.id} has a test of unknown kind {test['kind']!r}; known: {known}")
        name, other, find = test["table"], test.get("table_b", test["table"]), _TESTS[test["kind"]]
        printed = dict(find(test, printed_tables[name], printed_tables.get(other))) if name in printed_tables else {}
        for label, found in find(test, tables.get(name), tables.get(other)):
            on_paper = printed.get(label)
            if not fits(label, part.only) and (found or name in tables):
                continue
            if found is not None:
                found = replace(found, label=label, subject=_subject(test) if len(claim.tests) > 1 else "")
                if name in printed_tables and test.get("field", "mean") == "mean":
                    bounds, sign = _bounds(printed_tables[name].metric)
                    found = replace(found, effect=on_paper.value if on_paper else nan, bounds=bounds, sign=sign)
            if found or on_paper or label not in printed:
                yield found


def _compare(test: Test, table: Table, _: Table) -> Found:
    direction, is_closed = {"<": -1}.get(test["op"], 1), test["op"] == ">="
    field, several = test.get("field", "mean"), isinstance(test["b"], list)
    for other, column in product(test["b"] if several else [test["b"]], _columns(test, table)):
        one = _compared((table, _row(test["a"]), column), (table, _row(other), column), field)
        label = f"{_row(other)} | {column}" if several else column
        yield label, one and replace(one, direction=direction, is_closed=is_closed)


def _difference(test: Test, table: Table, other: Table) -> Found:
    columns_b = test.get("columns_b", {})
    for column in _columns(test, table):
        one = _compared((table, _row(test["a"]), column), (other, _row(test["b"]), columns_b.get(column, column)))
        yield column, one and replace(one, printed=test["published"]["difference"][column])


def _ratio(test: Test, table: Table, _: Table) -> Found:
    for column in _columns(test, table):
        one, sides = None, _sides([(table, _row(test[name]), column) for name in ("a", "b")])
        if sides and min(side.summary.mean for side in sides) > 0:
            above, below = sides
            value, printed = above.summary.mean / below.summary.mean, test["published"]["ratio"][column] - 1
            one = Comparison("", value, [(above.logs, below.logs)], printed=printed, is_log=True)
        yield column, one


def _along_columns(test: Test, table: Table, _: Table) -> Found:
    """Compare each column with the one before it."""
    row = _row(test["a"])
    if table is None:
        yield "all columns", None
        return
    for one, two in pairwise(table.columns):
        yield f"{one} to {two}", _compared((table, row, two), (table, row, one))


def _set_above(test: Test, table: Table, _: Table) -> Found:
    """Compare every row of a with every row of b. The value is the lowest of a minus the highest of b."""
    names = [f"{_row(one)} against {_row(other)}" for one, other in product(test["a"], test["b"])]
    for column in _columns(test, table):
        above, below = (_sides([(table, row, column) for row in test[name]]) for name in ("a", "b"))
        yield column, _several(list(product(above, below)), names, min)


def _spread(test: Test, table: Table, _: Table) -> Found:
    """Compare all cells in pairs. The value is the largest minus the smallest."""
    places = list(product([row.label for row in getattr(table, "rows", ())], getattr(table, "columns", ())))
    sides = zip(_sides([(table, *place) for place in places]), map(", ".join, places), strict=False)
    steps = list(combinations(sorted(sides, key=lambda each: each[0].summary.mean), 2))
    names = [f"{above} against {below}" for (_, below), (_, above) in steps]
    yield "max - min", _several([(above, below) for (below, _), (above, _) in steps], names, max)


def _column_difference(test: Test, table: Table, _: Table) -> Found:
    for row, printed in test["published"]["difference"].items():
        one = _compared((table, row, test["column_a"]), (table, row, test["column_b"]))
        yield row, one and replace(one, printed=printed)


def _best_minus_column(test: Test, table: Table, _: Table) -> Found:
    """Compare a column with all others. The value is the gap to the best of them, or 0."""
    column = test["column"]
    for row in test["published"]["difference"]:
        sides = {name: side for name in getattr(table, "columns", ()) if (side := _side((table, row, name)))}
        base = sides.pop(column, None)
        pairs = [(side, base) for side in sides.values() if base]
        one = _several(pairs, [f"{name} against {column}" for name in sides], max)
        yield row, one and replace(one, value=max(0.0, one.value), one_is_enough=True)


_TESTS: Mapping[str, Callable[[Test, Table, Table], Found]] = {
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
    if not isinstance(test.get("a"), str | Mapping):
        return ""
    return " against ".join(_row(test[name]) for name in ("a", "b") if isinstance(test.get(name), str | Mapping))


def _columns(test: Test, table: NumberTable | None) -> Sequence[str]:
    return test["columns"] if test["columns"] != "all" else getattr(table, "columns", ("all columns",))


def _compared(one: Place, other: Place, field: str = "mean") -> Comparison | None:
    sides = _sides([one, other], field)
    if not sides:
        return None
    first, second = sides
    value = first.summary.mean - second.summary.mean
    if field == "std":
        value = first.summary.std - second.summary.std
    # A spread that is not printed is no comparison. The spread of a single seed is one that decides nothing.
    if not isfinite(value) and not (first.samples and second.samples):
        return None
    return Comparison("", value, [(first, second)])


def _several(
    pairs: Sequence[tuple[Side, Side]], names: Sequence[str], pick: Callable[[Iterable[float]], float]
) -> Comparison | None:
    """Compare several pairs. The value is the picked difference. None without data."""
    if not pairs:
        return None
    return Comparison("", pick(one.summary.mean - other.summary.mean for one, other in pairs), pairs, names=names)


def _sides(places: Sequence[Place], field: str = "mean") -> list[Side]:
    """Return cells with their spreads, or [] if one of them has no data."""
    found = [side for place in places if (side := _side(place, field)) is not None]
    return found if len(found) == len(places) else []


def _side(place: Place, field: str = "mean") -> Side | None:
    """Return a cell with its spread. Spreads are compared through the values they come from."""
    (table, row, column), of = place, field.replace("std", "mean")
    if table is None:
        return None
    if samples := table.samples(row, column, of):
        untrained = table.samples(row, column, "untrained") if of == "mean" else None
        return Side(samples, summarize(list(samples.values())), untrained)
    mean, std = table.value(row, column, of), None
    if mean is None:
        return None
    if of == "mean":
        std = table.value(row, column, "std")
    return Side(None, Summary(getattr(table, "trials", None) or 1, mean, nan if std is None else std, nan, nan))


def _bounds(metric: str) -> tuple[tuple[float, float], int]:
    """Return the range of a printed metric, and -1 if smaller values are better, else 1."""
    if "seconds" in metric:
        return (0.0, inf), -1
    if "score" in metric:
        return (0.0, 1000.0), 1
    return (0.0, 100.0), 1
