"""Format numbers, counts and tables as plain text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def text_table(rows: Sequence[Sequence[str]], words: Collection[int] = (0,)) -> str:
    """Align the cells of a table: columns in `words` to the left (by default the first), the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{'<' if i in words else '>'}{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


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
    return f"{shown} {one if count == 1 else many or f'{one}s'}"


def are(count: int) -> str:
    """Return "is" or "are" for a count."""
    return "is" if count == 1 else "are"


def results_table(values: Mapping[str, float | None]) -> str:
    """Format results, a row for each name. Baselines such as "untrained/knn/accuracy" get their own column."""
    names = [name for name in values if name.partition("/")[2] not in values]
    columns = dict.fromkeys(name.partition("/")[0] for name in values if name.partition("/")[2] in values)
    rows = [["", "trained" if columns else "", *columns]]
    for name in names:
        beside = [number(values[f"{c}/{name}"]) if f"{c}/{name}" in values else "" for c in columns]
        rows.append([name, number(values[name]), *beside])
    rows = rows if columns else rows[1:]
    return text_table(rows) if rows else "(none)"


def shortened(text: str, most: int = 300) -> str:
    """Return the text, or its two ends if it is longer than `most` characters."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def number(value: float | None) -> str:
    """Format a number with four significant digits; None is "not finite"."""
    if value is None:
        return "not finite"
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"
