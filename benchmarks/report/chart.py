"""The base of all chart types, and what they share: style of series, long labels in lines, rounding, Altair itself.

Colours are names of the page's style sheet (`var(--c0)`), so one picture serves light, dark and print.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, isfinite, log10
from textwrap import wrap
from typing import Any

from dipole.benchmarks.report.table import Cell, ReportTable, count_cell, number_cell
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line

WIDTH, HEIGHT = 420, 240
NARROW = 280, 190
"""Size of pictures that stand three in a row."""
COLOURS = [f"var(--c{i})" for i in range(8)]
TEXT, SOFT = "var(--text)", "var(--soft)"
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
DASHES = [[1, 0], [7, 4], [2, 3], [8, 3, 2, 3]]
LETTERS, LINES = 36, 3
"""Longest line of a label, and the most lines of it."""
LETTER_WIDTH = 6.2
STEPS, DIGITS = 4000, 5
"""A picture shows an axis to one of so many steps, a tooltip shows so many digits."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """The base of all chart types: a title and the titles of both axes."""

    title: str
    x_label: str
    y_label: str

    @property
    def is_narrow(self) -> bool:
        """True if three of these fit in a row."""
        return False

    @property
    def shown(self) -> str:
        """The contents in words, for readers who cannot see the picture."""
        raise NotImplementedError

    @property
    def description(self) -> str:
        """The alternative text."""
        return f"{self.title}: {self.y_label or 'rows'} over {self.x_label}. {self.shown}"

    def draw(self) -> tuple[Any, dict[str, Rows]]:
        """Return the Altair chart, and its named data sets."""
        raise NotImplementedError

    def numbers(self) -> ReportTable:
        """Return the numbers of the chart as a table."""
        raise NotImplementedError

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite spec, without configuration: the page and the files have one each."""
        chart, datasets = self.draw()
        drawn: dict[str, Any] = chart.to_dict(validate=False)
        del drawn["config"], drawn["$schema"]
        # Altair would copy the rows several times.
        return {"description": self.description, "datasets": datasets, **drawn}

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> ReportTable:
        return ReportTable("", self.title, tuple(head), [tuple(row) for row in rows], self.description)


def altair() -> Any:
    """Import Altair when a chart is drawn: nothing else needs it.

    Raises:
        ConfigError: Altair is not installed.
    """
    try:
        import altair
    except ModuleNotFoundError as error:
        message = f"the charts of a report need Vega-Altair. Install it with: {install_line('report')}"
        raise ConfigError(message) from error
    return altair


def chosen() -> Any:
    """Return the selection that a click in the legend makes."""
    return altair().selection_point(name="chosen", fields=["series"], bind="legend")


def unless_chosen(shown: float, faint: float, empty: bool = True) -> Any:
    """Return `shown` for the series chosen in the legend and `faint` for the others.

    Without a choice all series are `shown`, or all are `faint` if `empty` is False.
    """
    condition = {"param": "chosen", "value": shown} | ({} if empty else {"empty": False})
    return altair().OpacityValue(faint, condition=condition)


def tip(field: str, title: str | None = None, number_format: str | None = None) -> Any:
    """Return one line of a tooltip: a name, or a number if it has a format."""
    given = {"type": "nominal"}
    if number_format:
        given = {"type": "quantitative", "format": number_format}
    if title:
        given["title"] = title
    return altair().Tooltip(field, **given)


def series_by(labels: Sequence[str], references: Sequence[str] = ()) -> tuple[Any, Any, Any]:
    """Return colour, marker and dashes of series by their place. Reference series are grey and dashed."""
    alt = altair()
    own = list(dict.fromkeys(label for label in labels if label not in references))
    legend = None
    if len(labels) > 1:
        longest = min(LETTERS, max(map(len, labels)))
        legend = alt.Legend(columns=max(1, int(WIDTH / (34 + 6.7 * longest))), **wrapped(labels))

    def channel(kind: Any, values: Sequence[Any], reference: Any, repeat: int = 1) -> Any:
        of = {label: values[i // repeat % len(values)] for i, label in enumerate(own)}
        shown = [of.get(label, reference) for label in labels]
        scale = alt.Scale(domain=list(labels), range=shown)
        return kind("series", type="nominal", scale=scale, legend=legend, sort=None)

    return (
        channel(alt.Color, COLOURS, SOFT),
        channel(alt.Shape, SHAPES, "stroke"),
        channel(alt.StrokeDash, DASHES, [4, 4], len(COLOURS)),
    )


def wrapped(labels: Sequence[str]) -> dict[str, Any]:
    """Return settings of an axis or legend that break long labels into lines."""
    long = {label: broken(label) for label in labels if len(label) > LETTERS}
    if not long:
        return {}
    return {"labelExpr": f"({json.dumps(long, ensure_ascii=False)})[datum.value] || datum.label"}


def wrapped_rows(labels: Sequence[str]) -> dict[str, Any]:
    """Return the same settings for names of rows, with their lines centred on the row."""
    alt = altair()
    offsets: dict[int, list[str]] = {}
    for label in labels:
        offsets.setdefault(len(broken(label)), []).append(label)
    lifted = [
        {"test": f"indexof({json.dumps(names, ensure_ascii=False)}, datum.value) >= 0", "value": -6.5 * (lines - 1)}
        for lines, names in sorted(offsets.items())
        if lines > 1
    ]
    found = wrapped(labels)
    if lifted:
        found["labelOffset"] = alt.ConditionalAxisNumber(condition=lifted, value=0)
    return found


def broken(label: str) -> list[str]:
    """Break a label into lines of at most LETTERS letters. Three dots mark what is cut off."""
    if len(label) <= LETTERS:
        return [label]
    return wrap(label, LETTERS, max_lines=LINES, placeholder=" ...") or [label[:LETTERS]]


def row_step(labels: Sequence[str]) -> int:
    """Return the pixels from row to row that these labels need."""
    lines = max(len(broken(label)) for label in labels)
    if lines == 1:
        return 24
    return 13 * lines + 5


def width_beside(labels: Sequence[str]) -> int:
    """Return the width that row names leave for what is drawn beside them.

    Names and drawing share the width: long names must not make the picture, and so its letters, smaller.
    """
    return WIDTH + 40 - int(LETTER_WIDTH * max(min(len(label), LETTERS) for label in labels))


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Round values to the resolution of a picture, with None for values that are not finite.

    That is STEPS steps over their range, and at least DIGITS digits of each.
    """
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return [None] * len(values)
    reach, size = max(known) - min(known), max(map(abs, known))
    decimals = DIGITS - floor(log10(size or 1.0))
    if reach > 0:
        decimals = floor(log10(STEPS)) - floor(log10(reach))
    found: list[float | None] = []
    for value in values:
        if value is None or not isfinite(value):
            found.append(None)
        elif value == 0:
            found.append(round(value, max(decimals, 0)))
        else:
            found.append(round(value, max(decimals, DIGITS - 1 - floor(log10(abs(value))))))
    return found


def sparse(names: Sequence[str], step: float) -> list[str]:
    """Return as many numbers of an axis as have room, at `step` pixels each."""
    return list(names[:: ceil((max(map(len, names)) * LETTER_WIDTH + 6) / step)])


def first_of(names: Sequence[str], count: int) -> str:
    """Return the first `count` names as text, and how many more there are."""
    text = ", ".join(names[:count])
    if len(names) > count:
        text += f" and {len(names) - count} more"
    return text


def layered(layers: Sequence[Any], width: Any, height: Any) -> Any:
    """Return layers over the data set `rows`."""
    alt = altair()
    return alt.layer(*layers, data=alt.NamedData("rows"), width=width, height=height)


def cell_of(value: float | None) -> Cell:
    """Return a number as a cell, which is empty if the number is not finite."""
    if isinstance(value, int):
        return count_cell(value)
    return number_cell(value)
