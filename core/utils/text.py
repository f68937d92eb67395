"""Format numbers, counts and tables as plain text."""

import re
import shutil
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

_CONTROL = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u206f\\ud800-\\udfff\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)


def printable(text: str, keep: str = "\n\t") -> str:
    """Write characters that control a terminal, or turn the direction of a line, as escapes: \\x1b, \\u202e."""
    if text.isprintable():  # nearly every text, in a tenth of the time
        return text
    return _CONTROL.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


def warn(message: str, stacklevel: int = 2) -> None:
    """Show a UserWarning with control characters as escapes, as it may name what a file of another person holds."""
    warnings.warn(printable(message), stacklevel=stacklevel + 1)


def screen_width() -> int:
    """Return the columns of the terminal, at least 40. COLUMNS overrides it. Without a terminal it is 80."""
    return max(40, shutil.get_terminal_size().columns)


def folded(text: str, width: int) -> list[str]:
    """Break a text at spaces into lines of at most `width` characters. Longer words are cut."""
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def text_table(rows: Sequence[Sequence[str]], words: Collection[int] = (0,), width: int = 0) -> str:
    """Align the cells of a table: columns in `words` to the left (by default the first), the others to the right.

    Left columns and names of columns are wrapped until the table fits the width (0: screen). If numbers alone are too
    wide, the table is cut into blocks of columns below each other, which repeat the first column.
    """
    columns = list(zip(*([printable(cell, keep="") for cell in row] for row in rows), strict=True))
    width = width or screen_width()
    natural = [max(map(len, cells)) for cells in columns]
    least = [min(natural[i], _least(cells, i in words)) for i, cells in enumerate(columns)]
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(columns)):
        if len(blocks[-1]) > 1 and sum(least[i] + 2 for i in (*blocks[-1], column)) - 2 > width:
            blocks.append([0])
        blocks[-1].append(column)
    tables = []
    for block in blocks:
        room = {i: natural[i] for i in block}
        while sum(room.values()) + 2 * len(block) - 2 > width:
            wide = [i for i in block if room[i] > least[i]]
            if not wide:
                break
            room[max(wide, key=room.__getitem__)] -= 1
        lines = _lines([columns[i] for i in block], list(room.values()), [i in words for i in block])
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


_NARROW, _WORD = 12, 36
"""A column of text is not wrapped to less, nor to less than its longest word up to `_WORD`."""


def _least(cells: Sequence[str], is_left: bool) -> int:
    """Return the least width of a column. Of a column of numbers only the name is wrapped."""
    wrapped = cells if is_left else cells[:1]
    longest = max((len(word) for cell in wrapped for word in cell.split()), default=0)
    return max(_NARROW, min(longest, _WORD), *map(len, cells[len(wrapped) :]))


def _lines(columns: Sequence[Sequence[str]], room: Sequence[int], is_left: Sequence[bool]) -> Iterator[str]:
    """Yield the lines of a table, whose columns have these widths."""
    for row in zip(*columns, strict=True):
        cells = [folded(cell, max(1, most)) for cell, most in zip(row, room, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = (
                part.ljust(most) if left else part.rjust(most)
                for part, most, left in zip(parts, room, is_left, strict=True)
            )
            yield "  ".join(aligned).rstrip()


def definitions(entries: Iterable[Sequence[str]], indent: str = "", width: int = 0) -> str:
    """Format names and their paragraphs: the meaning starts in one column and is wrapped to the width (0: screen).

    Control characters are written as escapes.
    """
    shown = [[printable(part, keep="") for part in entry] for entry in entries]
    width = (width or screen_width()) - len(indent)
    most = max(16, width // 3)
    column = 2 + max((len(name) for name, *_ in shown if len(name) <= most), default=min(2, most))
    lines = []
    for name, *paragraphs in shown:
        text = [line for each in paragraphs if each for line in folded(each, width - column)] or [""]
        if len(name) + 2 > column:
            lines += folded(name, width)
            name = ""
        lines += [f"{head:<{column}}{line}" for head, line in zip_longest([name], text, fillvalue="")]
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


_COMMAND = re.compile(r"`[^`\n]+`|(?<![\w./-])(?:dipole|pip install|python -m) (?:[^\s.]|\.(?=\S)|[^\S\n](?=\S))+")


def fitted(text: str, width: int) -> str:
    """Break the lines of a message at spaces to `width` characters.

    Commands are not broken, so that they can be copied. A line with a caret below it stays.
    """
    lines = text.split("\n")
    carets = {i for i, (_, below) in enumerate(pairwise(lines)) if below.strip() and not below.strip(" ^")}
    return "\n".join("\n".join(_fitted(line, width)) if i not in carets else line for i, line in enumerate(lines))


def _fitted(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip(" \t#"))]  # lines of a comment are comments
    # Spaces inside a command are replaced while the line is broken.
    joined = _COMMAND.sub(lambda found: found[0].replace(" ", "\0") if len(found[0]) < width else found[0], line)
    found = textwrap.wrap(
        joined,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [each.replace("\0", " ") for each in found]


def size(count: float) -> str:
    """Format a number of bytes: "532 B", "12.3 kB", "1.2 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:  # three digits of more are 1e+03
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


def shown(value: object) -> str:
    """Return what Python writes for a value, shortened."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"


def number(value: float | None) -> str:
    """Format a number with four significant digits. None is "not finite"."""
    if value is None:
        return "not finite"
    if 0.001 <= abs(value) < 1000 or value == 0:
        return f"{value:.4f}"
    return f"{value:.4g}"
