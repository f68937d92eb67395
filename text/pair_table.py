"""A table of pairs: each row is an anchor, its positive and negatives, as numbers of distinct texts, and its label."""

import hashlib
import math
import re
import tomllib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_file, replacing, scratch
from dipole.core.utils.rows import A_ROW_EACH, Located, located_rows, require_columns, texts_in
from dipole.core.utils.text import counted, shortened, warn
from dipole.text.cache import Told, hash_of, load_or_build, quiet
from dipole.text.splitting import READER

_NAMES = tomllib.loads(Path(__file__).with_name("pair_columns.toml").read_text(encoding="utf-8"))
USUAL, NEGATIVES, LABELS = (_NAMES[kind] for kind in ("usual", "negatives", "labels"))
WRITTEN = re.compile(r"""\[(['"]).*\1\]|b(['"]).*\2""", re.DOTALL)  # Python's lists of texts, and bytes
TELL_AFTER = 1 << 20  # characters
SHOWN = 5  # labels that are named in a message
TEXTS = "texts.arrow"
TOGETHER = 10_000  # texts that are hashed together
MISSING = ("", "nan", "na", "n/a", "null", "none")  # of a table of text
WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}


@dataclass(frozen=True)
class PairLabel:
    """With "filter" rows are kept whose label is `start` or more, or has this name (None: 1 of the labels 0 and 1).
    With "target" rows are weighted by their label, `start` or the highest as 1.
    """

    column: str | None = None  # None: there is no such column
    use: Literal["filter", "target"] = "filter"
    start: float | str | None = None

    def weight(self, row: dict[str, Any], where: str) -> float | None:
        """Return the weight of a row, or None if the row is left out."""
        if self.column is None:
            return 1.0
        cell = row.get(self.column)
        if cell is None or cell != cell:  # null, NaN
            return None
        if isinstance(self.start, str):
            return 1.0 if str(cell).strip().lower() == self.start.strip().lower() else None
        if str(cell).strip().lower() in MISSING:
            return None
        value = self._number(cell, where)
        if self.use == "target":
            if value < 0:
                raise DataError(f"{where}: the label {value:g} is negative, and weights are not.")
            return value
        if self.start is None and value not in (0, 1):
            raise DataError(
                f"{where}: the column {self.column!r} holds {value:g}, and only 0 and 1 say which rows are pairs. Set "
                f'text.label_from to the least label of a pair, or to a name ("0" in quotation marks is the label 0 '
                f"alone), or set text.label_use = 'target'."
            )
        least = 1.0 if self.start is None else self.start
        return 1.0 if value >= least else None

    def _number(self, cell: Any, where: str) -> float:
        text = str(cell).strip().lower()
        with suppress(ValueError):
            value = float(WORDS.get(text, text))
            if math.isfinite(value):
                return value
        fix = "Set text.label_from to the label of a pair, such as 'entailment'."
        if "," in text and not text.strip("-+.,0123456789"):
            fix = "Write it with a decimal point (pandas: read_csv(FILE, decimal=','), then to_csv)."
        elif self.use == "target":
            fix = "Weights are numbers. With text.label_use = 'filter', text.label_from can be the label of a pair."
        raise DataError(f"{where}: the label {str(cell)[:40]!r} is no number. {fix}")

    def scaled(self, weights: Iterable[float]) -> np.ndarray | None:
        """Return the weights of all rows, (n,) float32 between 0 and 1. None if all rows have one weight."""
        if self.column is None or self.use != "target":
            return None
        found = np.array(weights, np.float64)
        top = self.start or found.max(initial=0)
        if not top:
            raise DataError(f"all labels in the column {self.column!r} are 0, so no row would be trained.")
        return (found / float(top)).clip(max=1).astype(np.float32)


@dataclass(frozen=True)
class PairTable:
    """Rows of texts that belong together, as numbers of distinct texts. Arrays can be memory maps."""

    texts: Sequence[str]  # distinct, in the order of their first occurrence
    anchor: np.ndarray  # (n,) numbers of texts
    positive: np.ndarray  # (n,) the same
    negatives: np.ndarray  # (n, m) the same, filled with -1 on the right
    columns: tuple[str, ...]
    read: int = 0  # rows
    incomplete: int = 0  # rows without anchor or positive, skipped
    fewer: int = 0  # rows without a negative, used
    filtered: int = 0  # rows that were left out because of their label
    weights: np.ndarray | None = None  # (n,) of the rows, by their label; None: all are alike

    def __len__(self) -> int:
        return len(self.anchor)

    @cached_property
    def fingerprint(self) -> str:
        """Content hash of the numbers. The texts have their own."""
        arrays = (self.anchor, self.positive, self.negatives, self.weights)
        return hash_of(*(array for array in arrays if array is not None))

    @cached_property
    def texts_hash(self) -> str:
        digest = hashlib.sha256()
        for start in range(0, len(self.texts), TOGETHER):
            digest.update("\n".join(self.texts[start : start + TOGETHER]).encode())
        return digest.hexdigest()

    def take(self, rows: np.ndarray) -> tuple["PairTable", np.ndarray]:
        """Return some rows as a table without texts, and the numbers that their texts had."""
        numbers = self.numbers_of(rows)
        texts = np.unique(numbers[numbers >= 0])
        renumbered = np.where(numbers < 0, -1, np.searchsorted(texts, numbers))
        return PairTable([], renumbered[:, 0], renumbered[:, 1], renumbered[:, 2:], self.columns), texts

    def numbers_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the anchor, the positive and the negatives of each row, (r, 2 + m)."""
        return np.column_stack([self.anchor[rows], self.positive[rows], self.negatives[rows]])


class PairWriter:
    """Collects rows and numbers their texts by digests of 16 bytes. The texts go into an Arrow file or a list."""

    def __init__(self, file: Path | None, label: PairLabel) -> None:
        self._file, self._label = file, label
        self._weights = array("d")
        self._digests = bytearray()
        self._pairs = array("q")  # places of anchor and positive of each pair among the added texts
        self._fewer = array("q")  # negatives of each pair
        self._negatives = array("q")  # their places
        self._texts: list[str] = []
        self._writer: Any = None
        if file is not None:
            datasets = READER.package("datasets")
            features = datasets.Features({"text": datasets.Value("string")})
            self._writer = datasets.arrow_writer.ArrowWriter(features=features, path=str(file))

    def add(self, anchor: str, positives: Sequence[str], negatives: Sequence[str], weight: float) -> None:
        """Add a pair for each positive, all with the same anchor, negatives and weight."""
        first = len(self._digests) // 16
        for text in (anchor, *positives, *negatives):
            self._digests += hashlib.sha256(text.encode()).digest()[:16]
            if self._writer is None:
                self._texts.append(text)
            else:
                self._writer.write({"text": text})
        after = first + 1 + len(positives)
        for positive in range(first + 1, after):
            self._weights.append(weight)
            self._pairs.extend((first, positive))
            self._fewer.append(len(negatives))
            self._negatives.extend(range(after, after + len(negatives)))

    def table(self, counts: dict[str, Any]) -> PairTable:
        arrays, is_first = self._arrays()
        return PairTable(list(compress(self._texts, is_first)), **arrays, **counts)

    def write(self, folder: Path) -> list[str]:
        """Write the distinct texts and the numbers. Return the names of the files."""
        self._writer.finalize()
        arrays, is_first = self._arrays()
        datasets = READER.package("datasets")
        every = datasets.Dataset.from_file(str(self._file)).with_format("arrow")
        with quiet(datasets), replacing(folder / TEXTS) as temporary:
            every.select(np.flatnonzero(is_first)).map(batched=True, cache_file_name=str(temporary))
        for name, values in arrays.items():
            with atomic_file(folder / f"{name}.npy") as file:
                np.save(file, values)
        return [TEXTS, *(f"{name}.npy" for name in arrays)]

    def _arrays(self) -> tuple[dict[str, Any], np.ndarray]:
        """Return the arrays of a `PairTable`, and which of the added texts are first occurrences."""
        # Equal digests have one number, in the order of their first occurrence.
        digests = np.frombuffer(self._digests, "V16")
        _, first, place = np.unique(digests, return_index=True, return_inverse=True)
        is_first = first[place] == np.arange(len(digests))
        numbers = (np.cumsum(is_first) - 1)[first[place]]
        pairs = numbers[np.array(self._pairs, np.int64)].reshape(-1, 2)
        counts = np.array(self._fewer, np.int64)
        present = np.arange(counts.max(initial=0)) < counts[:, None]
        negatives = np.full(present.shape, -1, np.int64)
        negatives[present] = numbers[np.array(self._negatives, np.int64)]
        arrays: dict[str, Any] = {"anchor": pairs[:, 0], "positive": pairs[:, 1], "negatives": negatives}
        if (weights := self._label.scaled(self._weights)) is not None:
            arrays["weights"] = weights
        return arrays, is_first


def _opened(folder: Path, files: Iterable[str], counts: dict[str, Any], known: dict[str, str]) -> PairTable:
    texts = READER.package("datasets").Dataset.from_file(str(folder / TEXTS))["text"]
    # Slices of plain arrays are made several times as fast as slices of memory maps.
    arrays: dict[str, Any] = {
        Path(each).stem: np.asarray(np.load(folder / each, mmap_mode="r")) for each in files if each != TEXTS
    }
    table = PairTable(texts, **arrays, **{**counts, "columns": tuple(counts["columns"])})
    vars(table).update(known)  # the cached properties
    return table


def read_pairs(
    source: str,
    columns: Sequence[str] | None = None,
    *,
    split: str = "train",
    encoding: str = "utf-8",
    limit: int | None = None,
    folder: Path | None = None,
    label: PairLabel | None = None,
    tell: Told | None = None,
    unchanged: Callable[[], bool] = lambda: True,
) -> PairTable:
    """Read a table of pairs, in which a cell is a text. A cell that is absent, null, empty or blank is missing.

    A negative can be a list of texts, each a negative. So can a positive: then every text of it makes a row. A row
    without its anchor or positive is skipped, one without a negative is used, and a warning gives both numbers. Without
    `columns`, those with usual names are used. Without `label`, a column with a usual name for labels must hold one
    value. A folder caches the table. `unchanged` returns False if the source has changed since the folder was named.
    """
    labels = label or PairLabel()

    def read(writer: PairWriter) -> dict[str, Any]:
        rows = located_rows(source, split, encoding, READER)
        counts = _read(writer, islice(rows, limit), source, columns, labels, tell)
        if not unchanged():
            raise DataError(f"{source} was changed while it was read. Nothing is cached. Start again later.")
        return counts

    def build(folder: Path) -> tuple[dict[str, Any], list[str]]:
        with scratch(folder / TEXTS) as temporary:
            writer = PairWriter(temporary, labels)
            counts = read(writer)
            files = writer.write(folder)
        table = _opened(folder, files, counts, {})
        known = {"fingerprint": table.fingerprint, "texts_hash": table.texts_hash}
        return {"counts": counts, "known": known}, files

    def load(folder: Path, index: dict[str, Any]) -> PairTable:
        return _opened(folder, index["files"], index["counts"], index["known"])

    if folder is not None:
        table = load_or_build(folder, load, build)
    else:
        writer = PairWriter(None, labels)
        table = writer.table(read(writer))
    anchor, positive, *_ = table.columns
    notes = []
    if table.incomplete:
        notes.append(f"{table.incomplete} have no {anchor!r} or no {positive!r} and are skipped")
    if table.fewer:
        notes.append(f"{table.fewer} lack a negative and are used with the others")
    if notes:
        warn(f"{source}: of {table.read} rows {', '.join(notes)}")
    return table


def _read(
    writer: PairWriter,
    rows: Iterable[Located],
    source: str,
    columns: Sequence[str] | None,
    label: PairLabel,
    tell: Told | None,
) -> dict[str, Any]:
    """Add complete rows to a table, and return what `PairTable` tells of the others."""
    names: tuple[str, ...] = ()
    incomplete = fewer = read = characters = filtered = 0
    labels: dict[str, str] = {}  # of the first row, by column, which are not used
    others: set[str] = set()  # labels of rows that are left out
    splits: set[str] = set()  # named in a column of this name
    for where, row in rows:
        read += 1
        if not isinstance(row, dict):
            require_columns(row, columns or ("anchor", "positive"), where)
        if not names:
            names = tuple(columns or _usual(row, where))
            used = [name for name in (*names, label.column) if name is not None]
            require_columns(row, used, where)
            unused = [str(name) for name in row if name not in used]
            if label.column is None:
                labels = {name: str(row[name]) for name in unused if plain_name(name) in LABELS}
            for name in names:
                cell = row.get(name)
                if isinstance(cell, str) and WRITTEN.fullmatch(cell):
                    told = f"{where}: {name!r} holds a list or bytes as text, {cell[:40]!r}"
                    warn(f"{told}, which is trained as it is. Save lists as .jsonl, and decode bytes", stacklevel=4)
            if columns is None and unused:
                listed = ", ".join(map(repr, unused))
                warn(f"{source}: pairs are {', '.join(map(repr, names))}. Unused: {listed}", stacklevel=4)
        check_labels(labels, row, where, columns is not None)
        if "split" in row:
            splits.add(str(row["split"]))
        weight = label.weight(row, where)
        if weight is None:
            filtered += 1
            if len(others) < SHOWN:
                others.add(repr(str(row.get(label.column))[:40]))
            continue
        anchor, positives, *negatives = (texts_in(row.get(name), name, where) for name in names)
        if len(anchor) > 1:
            raise DataError(f"{where}: the anchor {names[0]!r} holds {len(anchor)} texts; it must be one. {A_ROW_EACH}")
        if not anchor or not positives:
            incomplete += 1
            continue
        fewer += not all(negatives)
        hard = list(chain.from_iterable(negatives))
        writer.add(anchor[0], positives, hard, weight)
        characters += sum(map(len, [*anchor, *positives, *hard]))
        if tell is not None and characters >= TELL_AFTER:
            tell(characters, read)
            characters = 0
    if not names:
        raise DataError(f"{source} holds no row. Choose another file, or write it again if it should have rows.")
    if filtered == read:
        raise DataError(
            f"{source}: none of {counted(read, 'row')} has a label of a pair in {label.column!r}, which "
            f"holds {', '.join(sorted(others))}. Set text.label_from to one of them."
        )
    if incomplete + filtered == read:
        raise DataError(
            f"{source}: none of {counted(incomplete, 'row')} has both {names[0]!r} and {names[1]!r}. Set text.columns "
            f"= [anchor, positive, negatives ...]."
        )
    if label.column != "split" and len(splits) > 1 and "train" in splits:
        told = ", ".join(sorted(splits - {"train"})[:SHOWN])
        warn(
            f"{source}: rows of every 'split' are trained, those of {told} too. Leave only one in the file",
            stacklevel=4,
        )
    return {"columns": names, "read": read, "incomplete": incomplete, "fewer": fewer, "filtered": filtered}


def _usual(row: dict[str, Any], where: str) -> tuple[str, ...]:
    """Find the columns with usual names: anchor, positive, negatives."""
    plain = {plain_name(name): str(name) for name in row}
    for anchor, positive in USUAL:
        used = tuple(plain.get(plain_name(name), "") for name in (anchor, positive))
        if all(used):
            starts = "|".join(NEGATIVES.get(positive, ("negative",)))
            is_negative = re.compile(rf"(hard_)?({starts})s?[_-]*\d*", re.IGNORECASE).fullmatch
            return (*used, *(name for name in map(str, row) if is_negative(name) and name not in used))
    for name, cell in row.items():
        objects = cell if isinstance(cell, list) else [cell]
        if objects and isinstance(objects[0], dict):
            what = "conversations" if {"role", "from"} & set(objects[0]) else "objects"
            raise DataError(
                f'{where}: the column {name!r} holds {what}. Write their texts as columns, {{"anchor": "...", '
                f'"positive": "..."}}, or, if they are the rows, that array as the whole file.'
            )
    triples = [(anchor, positive, NEGATIVES.get(positive, ("negative",))[0]) for anchor, positive in USUAL]
    known = ", ".join("/".join(names) for names in triples)
    raise DataError(
        f"{where}: no usual names among the columns {shortened(', '.join(map(str, row)))}; known are {known}. "
        f"Set text.columns = [anchor, positive, negatives ...]. Add a line of names to a CSV file without one."
    )


def plain_name(name: Any) -> str:
    """Return the small letters and digits of a column's name: "1string" of "#1 String"."""
    return re.sub(r"[\W_]+", "", str(name)).lower()


def check_labels(labels: dict[str, str], row: dict[str, Any], where: str, are_chosen: bool) -> None:
    """Raise DataError if an unused label differs from that of the first row. For chosen columns it is one warning."""
    name = next((name for name, first in labels.items() if str(row.get(name)) != first), None)
    if name is None:
        return
    found = f"it holds {labels[name][:40]!r} and {str(row.get(name))[:40]!r}"
    use = (
        f"Set text.label = {name!r} to train rows of label 1, where text.label_from sets another label and "
        f"text.label_use = 'target' weights rows."
    )
    if not are_chosen:
        raise DataError(
            f"{where}: the column {name!r} seems to say which rows belong together: {found}. {use} Or set "
            f"text.columns to train every row as a pair."
        )
    warn(f"{where}: the column {name!r} is unused: {found}. Every row is trained as a pair. {use}", stacklevel=5)
    labels.clear()
