"""Read a table of pairs: an anchor, its positive and any number of negatives in each row."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.rows import Located, located_rows
from dipole.core.utils.text import counted
from dipole.text.cache import Told, load_or_build
from dipole.text.config import check_columns
from dipole.text.pair_table import Counts, PairTable, PairWriter, load_table, write_table
from dipole.text.splitting import READER

# Usual names: anchor, positive, and names of negatives, which can have a number (negative_3).
USUAL = (
    ("anchor", "positive", ("negative",)),
    ("anchor", "pos", ("neg",)),
    ("query", "positive", ("negative",)),
    ("query", "pos", ("neg",)),
    ("query", "answer", ("negative",)),
    ("question", "answer", ("negative",)),
    ("premise", "entailment", ("contradiction",)),
    ("sent0", "sent1", ("hard_neg",)),
    ("sentence1", "sentence2", ("negative", "sentence3")),
    ("sentence_1", "sentence_2", ("negative",)),
    ("text1", "text2", ("negative",)),
)
TELL_AFTER = 1 << 20  # characters


def read_pairs(
    source: str,
    columns: Sequence[str] | None = None,
    *,
    split: str = "train",
    encoding: str = "utf-8",
    limit: int | None = None,
    folder: Path | None = None,
    tell: Told | None = None,
    unchanged: Callable[[], bool] = lambda: True,
) -> PairTable:
    """Read a table of pairs.

    A cell is a text. A negative can be a list of texts, each a negative. So can a positive: then every text of it
    makes a row. A cell that is absent, null, empty or blank is missing. A row without its anchor or positive is
    skipped. A row without a negative is used. A warning gives both numbers.

    Args:
        source: see `rows.located_rows`.
        columns: anchor, positive and any negatives. None: the usual names (`USUAL`).
        folder: caches the table as memory-mapped files. None: stay in memory.
        unchanged: returns False if the source has changed since the folder was named.

    Raises:
        DataError: the table cannot be read or cached. The message names file and line.
    """
    if columns is not None:
        check_columns(columns)

    def read(writer: PairWriter) -> Counts:
        rows = located_rows(source, split, encoding, READER)
        counts = _read(writer, islice(rows, limit), source, columns, tell)
        if not unchanged():
            raise DataError(f"{source} was changed while it was read. Nothing is cached; start again later.")
        return counts

    if folder is None:
        writer = PairWriter()
        table = writer.table(**read(writer))
    else:
        table = load_or_build(folder, load_table, partial(write_table, fill=read))
    if table.incomplete or table.fewer:
        anchor, positive, *_ = table.columns
        notes = []
        if table.incomplete:
            notes.append(f"{table.incomplete} have no {anchor!r} or no {positive!r} and are skipped")
        if table.fewer:
            notes.append(f"{table.fewer} lack a negative and are used with the others")
        warnings.warn(f"{source}: of {table.read} rows {', '.join(notes)}", stacklevel=2)
    return table


def _read(
    writer: PairWriter, rows: Iterable[Located], source: str, columns: Sequence[str] | None, tell: Told | None
) -> Counts:
    """Add complete rows to a table, and return what `PairTable` tells of the others."""
    names: tuple[str, ...] = ()
    incomplete = fewer = read = characters = 0
    for where, row in rows:
        read += 1
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected named columns, got {type(row).__name__}: {str(row)[:60]!r}")
        if not names:
            names = tuple(columns or _usual(row, where))
            _check_present(names, row, where)
        anchor, positives, *negatives = (_texts(row.get(name), name, where) for name in names)
        if len(anchor) > 1:
            raise DataError(f"{where}: the anchor {names[0]!r} holds {len(anchor)} texts; it must be one")
        if not anchor or not positives:
            incomplete += 1
            continue
        fewer += not all(negatives)
        hard = list(chain.from_iterable(negatives))
        writer.add(anchor[0], positives, hard)
        characters += sum(map(len, [*anchor, *positives, *hard]))
        if tell is not None and characters >= TELL_AFTER:
            tell(characters, read)
            characters = 0
    if not names:
        raise DataError(f"{source} holds no row")
    if incomplete == read:
        raise DataError(
            f"{source}: none of {counted(incomplete, 'row')} has both {names[0]!r} and {names[1]!r}. Set text.columns "
            f"= [anchor, positive, negatives ...]."
        )
    return {"columns": names, "read": read, "incomplete": incomplete, "fewer": fewer}


def _usual(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Find the columns with usual names: anchor, positive, negatives."""
    lower = {str(name).lower(): str(name) for name in row}
    for anchor, positive, starts in USUAL:
        if anchor in lower and positive in lower:
            hard = [name for each, name in lower.items() if _numbered_as(each, starts) and each != positive]
            return (lower[anchor], lower[positive], *hard)
    known = ", ".join(f"{anchor}/{positive}/{starts[0]}" for anchor, positive, starts in USUAL)
    raise DataError(
        f"{where}: no usual names among the columns {', '.join(map(str, row))}; known are {known}. "
        f"Set text.columns = [anchor, positive, negatives ...]."
    )


def _numbered_as(name: str, starts: Sequence[str]) -> bool:
    """Return whether a name is one of `starts` or its plural, with or without a number."""
    stem = name.rstrip("0123456789").rstrip("_-")
    return any(stem in (start, f"{start}s", f"hard_{start}", f"hard_{start}s") for start in starts)


def _check_present(columns: Sequence[str], row: dict[str, Any], where: str) -> None:
    missing = next((name for name in columns if name not in row), None)
    if missing is not None:
        has = [str(name) for name in row]
        raise DataError(f"{where}: no column {missing!r}; it has {', '.join(has)}.{nearest(missing, has)}")


def _texts(cell: Any, name: str, where: str) -> list[str]:
    """Return the texts of a cell, with single blanks. A missing cell has none."""
    found = []
    if not isinstance(cell, list | tuple):
        cell = [cell]
    for each in cell:
        if each is None or (isinstance(each, float) and each != each):
            continue
        if not isinstance(each, str):
            raise DataError(f"{where}: column {name!r} holds {type(each).__name__}, expected a text or a list of texts")
        text = " ".join(each.split())
        if text:
            found.append(text)
    return found
