"""Prepare tables for the screen: heads such as `imbalance/imbalance=1` may break, and cells name their column.

On a narrow screen each cell of a table with three or more columns shows that name.
"""

from __future__ import annotations

import re
from html import escape, unescape
from itertools import count

TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td(?=[ >])")
TAG = re.compile(r"<[^>]+>")
NARROW = 2
"""Tables with this many columns fit on a narrow screen as they are."""


def labelled(html: str) -> str:
    """Return a page's HTML with labelled cells."""
    return TABLE.sub(_table, HEAD.sub(_breakable, html))


def _breakable(match: re.Match[str]) -> str:
    """Allow a line break after / and = in a head without markup."""
    if "<" in match[1]:
        return match[0]
    return match[0].replace(match[1], re.sub(r"([/=])(?=\w)", r"\1<wbr>", match[1]))


def _table(match: re.Match[str]) -> str:
    heads = [escape(unescape(TAG.sub("", head)).strip()) for head in HEAD.findall(match[1])]
    if len(heads) <= NARROW:
        return match[0]
    return f"<table data-wide>{ROW.sub(lambda row: _row(row[0], heads), match[1])}</table>"


def _row(row: str, heads: list[str]) -> str:
    """Label all cells but the first, which is the row's title."""
    number = count()

    def cell(_: re.Match[str]) -> str:
        column = next(number)
        label = heads[column] if 0 < column < len(heads) else ""
        return f'<td data-label="{label}"' if label else "<td"

    return CELL.sub(cell, row)
