"""Format numbers, counts and tables as plain text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def printable(text: str, keep: str = "\n\t") -> str:
    """Write characters that control a terminal, or turn the direction of a line, as escapes: \\x1b, \\u202e.

    Args:
        text: from a file that may be of another person.
        keep: control characters that stay.
    """
    return _CONTROL.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


def text_table(rows: Sequence[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """Align the cells of a table: columns in `words` to the left (by default the first), the others to the right.

    Control characters in cells are written as escapes.
    """
    rows = [[printable(cell, keep="") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    columns = [(str.rjust, str.ljust)[column in words] for column in range(len(widths))]
    return "\n".join(
        "  ".join(align(cell, width) for align, cell, width in zip(columns, row, widths, strict=True)).rstrip()
        for row in rows
    )


def size(count: float) -> str:
    """Format a number of bytes: "532 B", "12.3 kB", "1.2 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def counted(count: float, one: str, many: str = "") -> str:
    """Format a count: "1 run", "2.5 epochs", "3 entries" (pass `many` if the plural is not `one` with an s)."""
    shown = f"{count:g}" if isinstance(count, float) else str(count)
    if count == 1:
        return f"{shown} {one}"
    return f"{shown} {many or one + 's'}"


def are(count: int) -> str:
    """Return "is" or "are" for a count."""
    return ("are", "is")[count == 1]


def results_table(values: Mapping[str, float | None]) -> str:
    """Format results, a row for each name. Baselines such as "untrained/knn/accuracy" get their own column."""
    names = [name for name in values if name.partition("/")[2] not in values]
    columns = list(dict.fromkeys(name.partition("/")[0] for name in values if name.partition("/")[2] in values))
    rows = []
    if columns:
        rows.append(["", "trained", *columns])
    for name in names:
        cells = [name, *(f"{column}/{name}" for column in columns)]
        rows.append([name, *(number(values[cell]) if cell in values else "" for cell in cells)])
    if not rows:
        return "(none)"
    return text_table(rows)


def shortened(text: str, most: int = 300) -> str:
    """Return the text, or its two ends if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def number(value: float | None) -> str:
    """Format a number with four significant digits; None is "not finite"."""
    if value is None:
        return "not finite"
    if 0.001 <= abs(value) < 1000 or value == 0:
        return f"{value:.4f}"
    return f"{value:.4g}"
