"""Pairs of somebody's own: an anchor, its positive and any number of negatives in each row of a table."""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dipole.core.utils.cache import found
from dipole.core.utils.errors import ConfigError, DataError, nearest
from dipole.core.utils.rows import located_rows
from dipole.core.utils.text import counted
from dipole.text.corpus import READER
from dipole.text.filled_folder import building, writing
from dipole.text.pair_table import PairTable, PairWriter, load_table

# Usual names, each set with the anchor's first; a name and a number (negative_3) is one of them too.
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
TOLD = 1 << 20  # characters of texts after which is told how far the reading is


def read_pairs(
    source: str,
    columns: Sequence[str] | None = None,
    *,
    split: str = "train",
    encoding: str = "utf-8",
    limit: int | None = None,
    folder: Path | None = None,
    tell: Callable[[int, int], None] | None = None,
    same: Callable[[], bool] = lambda: True,
) -> PairTable:
    """Read a table of pairs.

    A cell is a text. A negative may be a list of texts, each a negative, and so may a positive: then every text of it
    makes a row. A cell that is absent, null, empty or blank is missing: without its anchor or positive a row is left
    out, without a negative it is kept. Both are counted, and said in a warning.

    Args:
        source: see `rows.located_rows`.
        columns: anchor, positive and any negatives; None finds them by their usual names (`USUAL`).
        split: of a data set.
        encoding: of CSV files.
        limit: rows that are read.
        folder: where the table is kept, mapped and not read at the next call; None holds it in memory.
        tell: is told the characters and the rows that were read since it was told last, and all rows.
        same: whether the source is still what the folder is named by; asked once it is read.

    Raises:
        ConfigError: wrong names. DataError: the source cannot be read, a column is not there, a cell is neither a
            text nor a list of texts, no row is complete, the folder cannot be written, or the source was changed
            meanwhile; the message names file and line.
    """
    if columns is not None:
        check_columns(columns)
    fill = partial(_fill, source, columns, split, encoding, limit, tell, same)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dipole-pairs-") as scratch:
            fill(Path(scratch))
            table = load_table(Path(scratch)).held()
    else:
        table = _kept(folder, fill)
    if table.incomplete or table.fewer:
        anchor, positive, *_ = table.columns
        said = [
            f"{table.incomplete} have no {anchor!r} or no {positive!r} and are left out" if table.incomplete else "",
            f"{table.fewer} lack a negative and are kept with those they have" if table.fewer else "",
        ]
        warnings.warn(f"{source}: of {table.read} rows {', '.join(filter(None, said))}", stacklevel=2)
    return table


def _kept(folder: Path, fill: Callable[[Path], None]) -> PairTable:
    """The table of a folder, which is filled by one process where it is not full or damaged."""
    table = found(partial(load_table, folder))
    if table is not None:
        return table
    with building(folder):
        table = found(partial(load_table, folder))
        if table is None:
            with writing(folder):
                fill(folder)
                table = load_table(folder)
        return table


def _fill(
    source: str,
    columns: Sequence[str] | None,
    split: str,
    encoding: str,
    limit: int | None,
    tell: Callable[[int, int], None] | None,
    same: Callable[[], bool],
    folder: Path,
) -> None:
    """Read the rows of a source into the files of a table."""
    named: tuple[str, ...] | None = None
    incomplete = fewer = read = characters = 0
    with PairWriter(folder) as writer:
        for where, row in located_rows(source, split, encoding, READER):
            if limit is not None and read == limit:
                break
            read += 1
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected named columns, got {type(row).__name__}: {str(row)[:60]!r}")
            if named is None:
                named = tuple(columns) if columns is not None else _usual(row, where)
                _check_there(named, row, where)
            cells = [_texts(row.get(name), name, where) for name in named]
            if len(cells[0]) > 1:
                raise DataError(f"{where}: the anchor {named[0]!r} holds {len(cells[0])} texts; it must be one")
            if not cells[0] or not cells[1]:
                incomplete += 1
                continue
            fewer += not all(cells[2:])
            characters += writer.add(cells)
            if tell is not None and characters >= TOLD:
                tell(characters, read)
                characters = 0
        if named is None:
            raise DataError(f"{source} holds no row")
        if incomplete == read:
            raise DataError(
                f"{source}: none of {counted(incomplete, 'row')} has both {named[0]!r} and {named[1]!r}: a cell of "
                f"each is missing. Say text.columns = [anchor, positive, negatives ...]."
            )
        if not same():
            raise DataError(
                f"{source} was changed while it was read, and nothing of it is kept. Start again when it is whole."
            )
        writer.finish({"columns": named, "read": read, "incomplete": incomplete, "fewer": fewer})


def check_columns(columns: Sequence[str]) -> None:
    """Raise ConfigError where names cannot be those of a table of pairs."""
    if len(columns) < 2 or len(set(columns)) < len(columns) or not all(columns):
        raise ConfigError(
            f"columns must name an anchor, a positive and any negatives, each once, got {list(columns)}; for example "
            f'["anchor", "positive", "negative"]'
        )


def _usual(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Columns with usual names, in the order anchor, positive, negatives."""
    lower = {str(name).lower(): str(name) for name in row}
    for anchor, positive, starts in USUAL:
        if anchor in lower and positive in lower:
            hard = [name for each, name in lower.items() if _numbered_as(each, starts) and each != positive]
            return (lower[anchor], lower[positive], *hard)
    known = ", ".join(f"{anchor}/{positive}/{starts[0]}" for anchor, positive, starts in USUAL)
    raise DataError(
        f"{where}: no usual names among the columns {', '.join(map(str, row))}; known are {known}. "
        f"Say text.columns = [anchor, positive, negatives ...]."
    )


def _numbered_as(name: str, starts: Sequence[str]) -> bool:
    """Whether it is one of the names, its plural, or either with a number behind."""
    stem = name.rstrip("0123456789").rstrip("_-")
    return any(stem in (start, f"{start}s", f"hard_{start}", f"hard_{start}s") for start in starts)


def _check_there(columns: Sequence[str], row: dict[str, Any], where: str) -> None:
    missing = next((name for name in columns if name not in row), None)
    if missing is not None:
        has = [str(name) for name in row]
        raise DataError(f"{where}: no column {missing!r}; it has {', '.join(has)}.{nearest(missing, has)}")


def _texts(cell: Any, name: str, where: str) -> list[str]:
    """The texts of a cell, blanks made single; what is missing is none."""
    listed = cell if isinstance(cell, list | tuple) else [cell]
    found = []
    for each in listed:
        if each is None or (isinstance(each, float) and each != each):
            continue
        if not isinstance(each, str):
            raise DataError(f"{where}: column {name!r} holds {type(each).__name__}, expected a text or a list of texts")
        text = " ".join(each.split())
        if text:
            found.append(text)
    return found
