"""Tables of a report on a terminal: as wide as it is, columns that do not fit in blocks below each other."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dipole.benchmarks.report.table import ReportTable

# Names and sentences wider than this are broken into lines.
WIDEST_NAME, WIDEST = 30, 24
# Most words of a column's name are no longer.
WORD = 13


def print_table(console: Console, table: ReportTable) -> None:
    """Print a table in blocks of columns that fit. Each repeats the first column, nothing is cut off."""
    shown = table.without_empty_columns()
    for place, chosen in enumerate(_blocks(console, shown)):
        console.print(_drawn(shown, chosen, shown.title if place == 0 else ""))


def _blocks(console: Console, table: ReportTable) -> list[list[int]]:
    blocks: list[list[int]] = []
    chosen = [0]
    # Measured as if there were room: a table says of itself that it is no wider than the terminal.
    room = console.options.update(width=10_000)
    for column in range(1, len(table.head)):
        wide = console.measure(_drawn(table, [*chosen, column], ""), options=room).maximum
        if wide > console.width and len(chosen) > 1:
            blocks.append(chosen)
            chosen = [0]
        chosen.append(column)
    return [*blocks, chosen]


def _drawn(table: ReportTable, chosen: Sequence[int], title: str) -> Table:
    found = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i in chosen:
        most = WIDEST if i else WIDEST_NAME
        if table.numeric[i]:
            # A column is as wide as its longest number. Its name is wrapped.
            most = max(WORD, *(len(text) for row in table.rows for text in (row[i].text, row[i].sub)))
        justify = "right" if table.numeric[i] else "left"
        found.add_column(escape(table.head[i]), justify=justify, overflow="fold", max_width=most)  # type: ignore[arg-type]
    for row in table.rows:
        found.add_row(*(escape(f"{row[i].text}\n{row[i].sub}" if row[i].sub else row[i].text) for i in chosen))
    return found
