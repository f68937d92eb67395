"""What a report holds, before any format: sections of tables and pictures, and how many of these a page draws."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dipole.benchmarks.report.chart import Chart
from dipole.benchmarks.report.table import ReportTable

# More lines than this become rows of a heat map.
MOST_LINES = 10
# A picture shows at most this many rows.
MOST_ROWS = 30
# The page draws this many pictures of a kind at once, the others on request. A large one counts as three.
DRAWN = 12

Item = TypeVar("Item")


@dataclass(frozen=True)
class Picture:
    """A chart and its caption. `note` is shown once above all pictures of a kind."""

    chart: Chart
    caption: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the report: a suite, or all runs outside suites."""

    id: str
    title: str
    subtitle: str
    notes: Sequence[str]
    tables: Sequence[ReportTable]
    pictures: Mapping[str, Sequence[Picture]]
    findings: Sequence[str] = ()
    is_suite: bool = False


@dataclass(frozen=True)
class Report:
    """Everything a report shows, before any format."""

    title: str
    created: str
    facts: Mapping[str, str]
    sections: Sequence[Section]
    machines: str = ""
    summary: str = ""

    @property
    def findings(self) -> list[str]:
        """The first lines: the findings of each suite, or a summary of many suites."""
        found = [f"{s.title}: {' '.join(s.findings)}" for s in self.sections if s.findings and not self.summary]
        return [line for line in (self.summary, *found, self.machines) if line]

    @property
    def tables(self) -> list[ReportTable]:
        return [table for section in self.sections for table in section.tables]


def pictured(chart: Chart | None, caption: str, note: str = "") -> list[Picture]:
    """Return a list of one picture, or an empty list if there is nothing to draw."""
    return [] if chart is None else [Picture(chart, caption, note)]


def drawn_at_once(pictures: Sequence[Picture]) -> int:
    """Return how many of the first pictures of a kind the page draws."""
    spent = 0
    for count, picture in enumerate(pictures):
        spent += 1
        if picture.chart.is_large:
            spent += 2
        if spent > DRAWN:
            return count
    return len(pictures)


def ends(items: Sequence[Item], value: Callable[[Item], float], what: str) -> tuple[list[Item], str]:
    """Return all items, or the largest and smallest in their order if there are too many, and a note."""
    if len(items) <= MOST_ROWS:
        return list(items), ""
    ordered = sorted(range(len(items)), key=lambda i: value(items[i]))
    half = MOST_ROWS // 2
    kept = {*ordered[:half], *ordered[-half:]}
    return [item for i, item in enumerate(items) if i in kept], (
        f"{MOST_ROWS} of {len(items)} {what}: the {half} largest and the {half} smallest. The tables have all."
    )
