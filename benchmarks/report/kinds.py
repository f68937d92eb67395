"""The kinds of charts as data: what is shown, before any library draws it (`dipole.benchmarks.report.drawing`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log

from dipole.core.utils.text import counted


@dataclass(frozen=True)
class Line:
    """One series: y against x, with an optional band (low, high) of the same length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    is_reference: bool = False


@dataclass(frozen=True)
class Steps:
    """One histogram: heights between edges; len(edges) = len(heights) + 1."""

    label: str
    edges: Sequence[float]
    heights: Sequence[float]


@dataclass(frozen=True)
class Dots:
    """One group of points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Estimate:
    """One row of an interval chart: low and high may be nan; `runs` are the values of the seeds, `source` whose."""

    label: str
    value: float
    low: float
    high: float
    runs: Sequence[float] = ()
    source: str = ""


@dataclass(frozen=True)
class Tile:
    """One place of a heat map: its value and, where it says more, its text."""

    row: str
    column: str
    value: float
    text: str = ""


@dataclass(frozen=True)
class Ranked:
    """One row of a rank chart: a mean rank, 1 the best."""

    label: str
    rank: float


@dataclass(frozen=True)
class Chart:
    """What all kinds have: a title, what the axes count, and a sentence for who cannot see the picture."""

    title: str
    x_label: str
    y_label: str

    @property
    def is_narrow(self) -> bool:
        """Whether it stands three in a row."""
        return False

    @property
    def description(self) -> str:
        """The alternative text."""
        return f"{self.title}: {self.y_label or 'rows'} over {self.x_label}. {self.shown}"

    @property
    def shown(self) -> str:
        """How many of what are in the picture."""
        raise NotImplementedError


@dataclass(frozen=True)
class LineChart(Chart):
    """Lines with bands; values that are not finite interrupt a line."""

    lines: Sequence[Line]
    from_zero: bool = False
    is_log: bool = False
    is_log_y: bool = False
    is_steps: bool = False

    @property
    def is_narrow(self) -> bool:
        """A line alone needs less room, and no legend."""
        return len(self.lines) == 1

    @property
    def shown(self) -> str:
        ends = [f"{one.label} ends at {last:.4g}" for one in self.lines if (last := _last(one.y)) is not None]
        return "; ".join(ends[:12]) + "."


@dataclass(frozen=True)
class HistogramChart(Chart):
    """Outlined densities over each other; pictures that are compared are given one `top`."""

    series: Sequence[Steps]
    top: float

    @property
    def is_narrow(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        return "Densities of " + ", ".join(one.label for one in self.series) + "."


@dataclass(frozen=True)
class ScatterChart(Chart):
    """Points by group; where it `is_equal`, one length is the same on both axes, so that angles are true."""

    groups: Sequence[Dots]
    is_equal: bool = True

    @property
    def is_narrow(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        return ", ".join(f"{counted(len(group.x), 'point')} of {group.label}" for group in self.groups) + "."


@dataclass(frozen=True)
class IntervalChart(Chart):
    """One row per label: a marker, its interval, a small dot per run; a line at `reference`, where there is one."""

    rows: Sequence[Estimate]
    reference: float | None = 0.0
    is_log: bool = False

    @property
    def shown(self) -> str:
        rows = [f"{(row.label + ' ' + row.source).strip()} {row.value:.4g}" for row in self.rows if isfinite(row.value)]
        more = "" if len(rows) <= 12 else f"; and {len(rows) - 12} more"
        return "; ".join(rows[:12]) + more + "."


@dataclass(frozen=True)
class RankChart(Chart):
    """Mean ranks, best first; `groups` join the rows (first, last) that differ by less than `difference`."""

    rows: Sequence[Ranked]
    groups: Sequence[tuple[int, int]]
    difference: float

    @property
    def shown(self) -> str:
        rows = "; ".join(f"{row.label} {row.rank:.3g}" for row in self.rows)
        names = [row.label for row in self.rows]
        joined = "; ".join(f"{names[a]} to {names[b]}" for a, b in self.groups)
        return f"{rows}. Critical difference {self.difference:.3g}; not told apart: {joined or 'none'}."


@dataclass(frozen=True)
class HeatMap(Chart):
    """Rows by columns, the value as colour; `middle` is where colours turn, None for values that only grow."""

    tiles: Sequence[Tile]
    value_label: str
    middle: float | None = None

    @property
    def shown(self) -> str:
        rows, columns = {tile.row for tile in self.tiles}, {tile.column for tile in self.tiles}
        return f"{counted(len(rows), 'row')} by {counted(len(columns), 'column')}; colour: {self.value_label}."


def line_chart(
    title: str, x_label: str, y_label: str, lines: Sequence[Line], from_zero: bool = False
) -> LineChart | None:
    """Lines, on logarithmic axes where x doubles from place to place or y spans WIDE_SPAN; None for no finite value."""
    if not any(isfinite(x) and isfinite(y) for line in lines for x, y in zip(line.x, line.y, strict=True)):
        return None
    numbers = [v for line in lines for of in (line.y, line.low or ()) for v in of if isfinite(v)]
    is_log_y = not from_zero and min(numbers) > 0 and max(numbers) > WIDE_SPAN * min(numbers)
    return LineChart(title, x_label, y_label, lines, from_zero, all(doubles(line.x) for line in lines), is_log_y)


def histogram(
    title: str, x_label: str, y_label: str, series: Sequence[Steps], top: float = 0.0
) -> HistogramChart | None:
    """Densities over each other, on an axis up to `top` at least; None where a value is missing."""
    heights = [h for s in series for h in s.heights]
    if not heights or not all(map(isfinite, [*heights, *(e for s in series for e in s.edges)])):
        return None
    return HistogramChart(title, x_label, y_label, series, max(top, *heights))


def scatter_chart(title: str, x_label: str, y_label: str, groups: Sequence[Dots]) -> ScatterChart | None:
    """Points by group, those that are finite; None for none."""
    kept = []
    for group in groups:
        points = [(x, y) for x, y in zip(group.x, group.y, strict=True) if isfinite(x) and isfinite(y)]
        kept.append(Dots(group.label, [x for x, _ in points], [y for _, y in points]))
    return ScatterChart(title, x_label, y_label, kept) if any(group.x for group in kept) else None


def interval_chart(
    title: str, x_label: str, rows: Sequence[Estimate], reference: float | None = 0.0
) -> IntervalChart | None:
    """Estimates below each other, on a logarithmic axis where they differ by more than SPAN times; None for none."""
    numbers = [v for r in rows for v in (r.value, r.low, r.high, *r.runs) if isfinite(v)]
    if not numbers:
        return None
    is_log = reference is None and min(numbers) > 0 and max(numbers) > SPAN * min(numbers)
    return IntervalChart(title, x_label, "", rows, reference, is_log)


def heat_map(
    title: str, x_label: str, y_label: str, tiles: Sequence[Tile], value_label: str, middle: float | None = None
) -> HeatMap | None:
    """Rows by columns, the finite tiles; None for none."""
    kept = [tile for tile in tiles if isfinite(tile.value)]
    return HeatMap(title, x_label, y_label, kept, value_label, middle) if kept else None


# Of a curve, which fills the picture between its ends, more is needed.
WIDE_SPAN = 100
# From this ratio on between the largest and the smallest of positive numbers the smaller ones share a few pixels.
SPAN = 20


def doubles(x: Sequence[float]) -> bool:
    """Whether positive numbers grow by factors rather than by steps: by 1.5 or more, or by equal ones; eightfold."""
    if len(x) < 3 or min(x) <= 0:
        return False
    ordered = sorted(set(x))
    if len(ordered) < 3 or ordered[-1] < 8 * ordered[0]:
        return False
    factors = [log(b / a) for a, b in pairwise(ordered)]
    return min(factors) >= log(1.5) or max(factors) <= 1.25 * min(factors)


def _last(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if isfinite(value)), None)
