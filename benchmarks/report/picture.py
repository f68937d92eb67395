"""A chart with its sentence, and how much of a large suite a page draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dipole.benchmarks.report.chart import Chart
from dipole.benchmarks.report.row_charts import HeatMap

# More lines than this in one picture are illegible: they become rows of a heat map.
MOST_LINES = 10
# More rows than this are no picture any more, but a table.
MOST_ROWS = 30
# So much of a kind is drawn at once. What is beyond is drawn when it is unfolded. A large map counts threefold.
DRAWN, LARGE = 12, 100

Item = TypeVar("Item")


@dataclass(frozen=True)
class Picture:
    """A chart and the sentence below it. `note` says once, above all of a kind, which were chosen."""

    chart: Chart
    caption: str
    note: str = ""


def pictured(chart: Chart | None, caption: str, note: str = "") -> list[Picture]:
    """A list of one picture, or of none if there is nothing to draw."""
    return [] if chart is None else [Picture(chart, caption, note)]


def drawn_at_once(pictures: Sequence[Picture]) -> int:
    """How many of the first pictures of a kind the page draws."""
    spent = 0
    for count, picture in enumerate(pictures):
        chart = picture.chart
        spent += 3 if isinstance(chart, HeatMap) and len(chart.tiles) > LARGE else 1
        if spent > DRAWN:
            return count
    return len(pictures)


def ends(items: Sequence[Item], value: Callable[[Item], float], what: str) -> tuple[list[Item], str]:
    """All items, or as many of the largest and smallest as are legible, in their order, and the sentence on it."""
    if len(items) <= MOST_ROWS:
        return list(items), ""
    ordered = sorted(range(len(items)), key=lambda i: value(items[i]))
    half = MOST_ROWS // 2
    kept = {*ordered[:half], *ordered[-half:]}
    return [item for i, item in enumerate(items) if i in kept], (
        f"{MOST_ROWS} of {len(items)} {what}: the {half} largest and the {half} smallest; all stand in the tables."
    )
