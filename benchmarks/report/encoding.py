"""What charts share: series by colour, marker and dashes; long labels in lines; values as far as pixels show them."""

import json
from collections.abc import Mapping, Sequence
from math import floor, isfinite, log10
from textwrap import wrap
from typing import Any

Spec = dict[str, Any]

WIDTH, HEIGHT = 420, 240
# Pictures that stand three in a row: their text is as large on the page as that of the others.
NARROW = 280, 190
COLOURS = [f"var(--c{i})" for i in range(8)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
DASHES = [[1, 0], [7, 4], [2, 3], [8, 3, 2, 3]]
LETTERS, ROWS = 36, 3
# A picture is read to a thousandth of its axis at most, a number under the pointer to five digits.
STEPS, DIGITS = 4000, 5

CHOSEN: Spec = {"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}


def unless_chosen(shown: float, faint: float, is_empty_all: bool = True) -> Spec:
    """`shown` for the series that the legend selects (all, where none is), `faint` for the others."""
    condition: Spec = {"param": "chosen", "value": shown}
    return {"condition": condition if is_empty_all else {**condition, "empty": False}, "value": faint}


def tip(name: str, title: str = "", form: str = "") -> Spec:
    """A line of what stands under the pointer: a name, or a number with its format."""
    return {
        "field": name, "type": "quantitative" if form else "nominal",
        **({"title": title} if title else {}), **({"format": form} if form else {}),
    }  # fmt: skip


def series_by(labels: Sequence[str], references: Sequence[str] = ()) -> tuple[Spec, Spec, Spec]:
    """Colour, marker and dashes of series by their place; a reference is grey and dashed beside them."""
    own = [label for label in labels if label not in references]
    rank = {label: i for i, label in enumerate(own)}
    legend: Spec | None = None
    if len(labels) > 1:
        longest = min(LETTERS, max(map(len, labels)))
        legend = {"columns": max(1, int(WIDTH / (34 + 6.7 * longest))), **wrapped(labels)}

    def channel(of: Sequence[Any], reference: Any, group: int = 1) -> Spec:
        values = [reference if name in references else of[rank[name] // group % len(of)] for name in labels]
        scale = {"domain": list(labels), "range": values}
        return {"field": "series", "type": "nominal", "scale": scale, "legend": legend, "sort": None}

    return channel(COLOURS, "var(--soft)"), channel(SHAPES, "stroke"), channel(DASHES, [4, 4], len(COLOURS))


def wrapped(labels: Sequence[str]) -> Spec:
    """Settings of an axis or legend that break long labels into lines; the whole is under the pointer."""
    long = {label: broken(label) for label in labels if len(label) > LETTERS}
    if not long:
        return {}
    return {"labelExpr": f"({json.dumps(long, ensure_ascii=False)})[datum.value] || datum.label"}


def wrapped_rows(labels: Sequence[str]) -> Spec:
    """The same for names of rows, their lines about the middle of the row."""
    lifted = []
    for lines in range(2, ROWS + 1):
        if names := [label for label in labels if len(broken(label)) == lines]:
            test = f"indexof({json.dumps(names, ensure_ascii=False)}, datum.value) >= 0"
            lifted.append({"test": test, "value": -6.5 * (lines - 1)})
    return {**wrapped(labels), **({"labelOffset": {"condition": lifted, "value": 0}} if lifted else {})}


def broken(label: str) -> list[str]:
    """A label in lines of at most LETTERS letters, the last one marked where not all of it is shown."""
    if len(label) <= LETTERS:
        return [label]
    return wrap(label, LETTERS, max_lines=ROWS, placeholder=" ...") or [label[:LETTERS]]


def rows_of(labels: Sequence[str]) -> int:
    """How many lines the longest label takes."""
    return max(len(broken(label)) for label in labels)


def row_step(labels: Sequence[str]) -> int:
    """Pixels from row to row that labels of so many lines need."""
    lines = rows_of(labels)
    return 24 if lines == 1 else 13 * lines + 5


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Values as far as a picture shows them: STEPS steps over their range, DIGITS digits each; None for no number."""
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return [None] * len(values)
    reach, size = max(known) - min(known), max(map(abs, known))
    decimals = STEPS_DIGITS - floor(log10(reach)) if reach > 0 else DIGITS - floor(log10(size or 1.0))
    return [
        None if value is None or not isfinite(value) else round(value, max(decimals, _decimals(value)))
        for value in values
    ]


STEPS_DIGITS = floor(log10(STEPS))


def _decimals(value: float) -> int:
    return DIGITS - 1 - floor(log10(abs(value))) if value else 0


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as lists of values by name; None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
