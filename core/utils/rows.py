"""Read rows of JSON lines, CSV, parquet and `datasets`, each with its location for messages."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from dipole.core.utils.cache import content_of
from dipole.core.utils.download import without_retry_messages
from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.extras import needing
from dipole.core.utils.text import counted, shortened, warn

JSON, CSV, PARQUET = (".jsonl", ".json", ".ndjson"), (".csv", ".tsv"), (".parquet",)
ROWS = (*JSON, *CSV, *PARQUET)
PACKINGS = (".gz", ".bz2", ".xz", ".zst")  # which can follow all but .parquet
ALSO_PACKED = f"(each also {', '.join(PACKINGS)}; unpack archives such as .zip and .tar.gz)"
KINDS = f"{', '.join(ROWS)} {ALSO_PACKED}"
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What opening and unpacking a file raises."""
LONGEST_CELL = 2**31 - 1  # bytes of a CSV cell; the library's own limit is 128 KiB
DIVIDERS = ",;\t|"
WIDE = b"\xff\xfe", b"\xfe\xff"  # marks of UTF-16
PACKED = b"\x1f\x8b", b"PK", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"
LONGEST_HEADER = 1 << 16  # bytes
QUOTED = re.compile(r'"(?:[^"]|"")*"')
NAME = re.compile(r'"?\w[\w -]{0,39}"?')
Located = tuple[str, Any]
"""The location of a row ("pairs.jsonl, line 3") and its value."""


@dataclass(frozen=True)
class Asker:
    """The reader's settings, for messages: of a split, and of the encoding of CSV files, or "". `extra` installs it."""

    extra: str
    split: str
    encoding: str = ""

    def package(self, name: str) -> Any:
        """Import a package of the extra, or say how to install it."""
        with needing(self.extra, "reading these rows"):
            return import_module(name)


def located_rows(source: str, split: str, encoding: str, asker: Asker) -> Iterator[Located]:
    """Yield the rows of a file, a folder of files or of `datasets`, or "hub:NAME" or "hub:NAME:SUBSET"."""
    if source.startswith("hub:"):
        yield from _numbered(hub_rows(source.removeprefix("hub:"), split, asker), source)
        return
    path = Path(source)
    if is_saved(path):
        yield from _numbered(_saved(path, split, asker), source)
        return
    files = row_files(path)
    note_splits(path, files)
    for file in files:
        if ends_with(file, PARQUET):
            yield from _numbered(parquet_rows(file, asker), str(file))
        elif ends_with(file, JSON):
            yield from json_rows(file)
        else:
            yield from csv_rows(file, encoding, asker)


def row_files(path: Path) -> list[Path]:
    """Return the files to read: this one, or those of a folder, sorted. Raise DataError if there is none."""
    if not path.exists():
        raise DataError(f"nothing at {path}. Give a file or folder of {KINDS}, or hub:NAME.")
    files = [p for p in (path, *visible(path)) if ends_with(p, ROWS) and p.is_file()]
    if not files and _has_tabs(path):
        return [path]
    if not files:
        what = f"{path} is none of them"
        if path.is_dir():
            what = f"the folder {path} holds no such file"
        raise DataError(f"rows are read from {KINDS}, and {what}.")
    return files


def visible(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted, without hidden files and folders, and without what the Hub tells of a set."""
    every = (p for p in folder.rglob("*") if p.name not in ("dataset_infos.json", "dataset_info.json"))
    return sorted(p for p in every if not any(part[0] == "." for part in p.relative_to(folder).parts))


def note_splits(path: Path, files: Iterable[Path]) -> None:
    """Warn if a folder holds the training files of a data set and those of another split, as all are read."""
    words = {word for file in files for word in re.findall("[a-z]+", str(file.relative_to(path)).lower())}
    others = sorted(words & {"test", "dev", "val", "valid", "validation"})
    if others and "train" in words:
        warn(
            f"{path}: every file is read, those called {', '.join(others)} too. Give the file or folder of one split, "
            f"or hub:{path}, which reads one split.",
            stacklevel=3,
        )


def _has_tabs(path: Path) -> bool:
    """Return whether a file is text whose first line has tabs, such as MRPC's .txt files."""
    if not (ends_with(path, (".txt", ".text", ".tab")) and path.is_file()):
        return False
    try:
        with open_bytes(path) as file:
            first = file.read(LONGEST_HEADER).partition(b"\n")[0]
    except DAMAGED as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return b"\t" in first and (b"\0" not in first or first.startswith(WIDE))


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def ends_with(file: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether the name of a file has one of these suffixes, in capitals or not, and packed or not."""
    return unpacked_name(file).lower().endswith(suffixes)


def unpacked_name(file: Path) -> str:
    """Return the name of a file without .gz and its like."""
    if file.name.lower().endswith(PACKINGS):
        return file.stem
    return file.name


def require_columns(row: Any, names: Sequence[str], where: str, setting: str = "") -> None:
    """Raise DataError unless a row has these columns. `setting` is added to the message: " Set SETTING."."""
    if not isinstance(row, dict):
        cells = ", ".join(f'"{name}": "..."' for name in names)
        raise DataError(
            f"{where}: expected named columns, got {type(row).__name__}: {str(row)[:60]!r}. Write each row as an "
            f"object, {{{cells}}}."
        )
    missing = next((name for name in names if name not in row), None)
    if missing is not None:
        has = list(map(str, row))
        shown = shortened(", ".join(has))
        raise DataError(f"{where}: no column {missing!r}; it has {shown}.{nearest(missing, has)}{setting}")


A_ROW_EACH = "Write one row on each line (pandas: to_json(FILE, orient='records', lines=True))."


def texts_in(cell: Any, name: str, where: str) -> list[str]:
    """Return the texts of a cell, a text or a list of texts, with single blanks. A missing or blank one has none."""
    found = []
    for each in cell if isinstance(cell, list | tuple) else [cell]:
        if each is None or (isinstance(each, float) and each != each):
            continue
        if not isinstance(each, str):
            raise DataError(
                f"{where}: column {name!r} holds {type(each).__name__}, expected a text or a list of them. {A_ROW_EACH}"
            )
        if text := " ".join(each.split()):
            found.append(text)
    return found


def _numbered(rows: Iterable[Any], where: str) -> Iterator[Located]:
    for number, row in enumerate(rows, 1):
        yield f"{where}, row {number}", row


def open_bytes(file: Path) -> Any:
    """Open a file for reading, unpacked if its name ends with one of `PACKINGS`. It cannot be read backwards."""
    if file.suffix.lower() == ".zst":
        import pyarrow  # a package of `datasets`. Python has zstandard from 3.14 on

        return pyarrow.input_stream(str(file), compression="zstd")
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(file.suffix.lower(), open)(file, "rb")


def open_packed(file: Path, encoding: str) -> IO[str]:
    """Open a text file, unpacked if its name ends with one of `PACKINGS`."""
    return io.TextIOWrapper(open_bytes(file), encoding, newline="")


def codec_of(encoding: str, file: Path) -> str:
    """Return the codec that reads an encoding, in UTF-8 without a byte-order mark. Raise DataError if there is none."""
    try:
        "".encode(encoding)  # there are codecs from bytes to bytes
    except LookupError:
        raise DataError(
            f"{file}: there is no encoding {encoding!r}; 'utf-8', 'latin-1' and 'cp1252' are the usual ones."
        ) from None
    name = codecs.lookup(encoding).name
    if name == "utf-8":
        return "utf-8-sig"
    return name


def json_rows(file: Path) -> Iterator[Located]:
    """Yield the JSON value of each line, without empty lines, or the items of a file that is one array."""
    number = 0
    try:
        is_array = _is_array(file)
        with open_packed(file, "utf-8-sig") as lines:
            if is_array:
                text = lines.read()
                for number, row in enumerate(json.loads(text), 1):
                    yield f"{file}, item {number}", _whole_text(text, row)
                return
            for line in lines:
                number += 1
                if line.strip():
                    yield f"{file}, line {number}", _whole_text(line, json.loads(line))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}, line {number or error.lineno}: not JSON ({error.msg}). Put one JSON value on each line, or "
            "make the file one array, [{...}, {...}]."
        ) from None
    except UnicodeEncodeError:
        raise DataError(f"{file}, line {number}: half a surrogate pair is no text") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, after line {number}: not UTF-8 ({error.reason}). {_fix(error, '')}.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or as many brackets
        raise DataError(f"{file}, line {number or 1}: {str(error).partition(';')[0]}") from None
    except DAMAGED as error:
        raise DataError(f"{file}, after line {number}: {error}") from None


def _is_array(file: Path) -> bool:
    """Return whether a file is one array of objects, rather than lines that may be arrays."""
    with open_packed(file, "utf-8-sig") as lines:
        filled = (line for line in lines if line.strip())
        first, second = next(filled, ""), next(filled, "")
    if not first.lstrip().startswith("["):
        return False
    try:
        values = json.loads(first)
    except ValueError:
        return True
    return not second and all(isinstance(each, dict) for each in values)


def _whole_text(text: str, row: Any) -> Any:
    """Return a row. Raise UnicodeEncodeError for half a surrogate pair, which only an escape can write."""
    if "\\ud" in text.lower():
        json.dumps(row, ensure_ascii=False).encode()
    return row


def csv_rows(file: Path, encoding: str, asker: Asker) -> Iterator[Located]:
    """Yield the rows of a CSV or TSV file with a header, as dictionaries of strings."""
    delimiter = "\t,"[ends_with(file, (".csv",))]
    csv.field_size_limit(LONGEST_CELL)
    begins = 1
    try:
        codec = codec_of(encoding, file)
        quoting: Any = csv.QUOTE_MINIMAL
        if delimiter == "\t" and _has_plain_quotes(file, codec):
            quoting = csv.QUOTE_NONE
        with open_packed(file, codec) as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting)
            header = [name.strip() for name in next(reader, [])]
            if delimiter.join(header) == f"sep={delimiter}":  # Excel's first line
                header = [name.strip() for name in next(reader, [])]
            if not any(header):
                raise DataError(f"{file}, line 1: no header; the first line must name the columns")
            twice = next((name for name in header if name and header.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{file}, line 1: two columns are called {twice!r}. Rename one.")
            _check_divided(header, delimiter, file)
            begins = reader.line_num + 1
            for cells in reader:
                where = f"{file}, line {begins}"
                begins = reader.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{where}: {counted(len(cells), 'cell')}, the header names {len(header)}: {', '.join(header)}. "
                        f"Complete the line, or quote cells that hold {delimiter!r}."
                    )
                yield where, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{file}, line {begins}: not CSV ({error}). Divide cells by commas in .csv and by tabs in .tsv, and "
            "double a quotation mark in a quoted cell."
        ) from None
    except UnicodeDecodeError as error:
        fix = _fix(error, asker.encoding)
        raise DataError(f"{file}, after line {begins - 1}: not {encoding} ({error.reason}). {fix}.") from None
    except UnicodeError as error:  # UTF-16 without its mark
        raise DataError(f"{file} is not {encoding}: {error}. Say {asker.encoding}, for example 'utf-8'.") from None
    except DAMAGED as error:
        raise DataError(f"{file}, after line {begins - 1}: {error}") from None


def _fix(error: UnicodeDecodeError, setting: str) -> str:
    """Return what to do about a file of other bytes. `setting` names its encoding, if there is one."""
    if error.object.startswith(PACKED):
        return "It is packed: unpack it, save a spreadsheet as CSV, or let its name end with .gz, .bz2, .xz or .zst"
    if setting and error.object.startswith(WIDE):
        return f"It begins as UTF-16 does: say {setting} = 'utf-16'"
    if setting:
        return f"Say {setting}, for example 'latin-1' or 'cp1252'"
    return "Save it as UTF-8"


def _has_plain_quotes(file: Path, codec: str) -> bool:
    """Return whether quotation marks of a file with tabs are plain characters.

    They are if each line has the cells of the header, and a quotation mark begins a cell that is not properly quoted.
    """
    count = None
    is_plain = False
    with open_packed(file, codec) as lines:
        for line in lines:
            cells = line.rstrip("\r\n").split("\t")
            count = count or len(cells)
            if len(cells) != count and '"' in line:
                return False
            is_plain = is_plain or any(cell[:1] == '"' and not QUOTED.fullmatch(cell) for cell in cells)
    return is_plain


def _check_divided(header: list[str], by: str, file: Path) -> None:
    """Raise DataError if the header seems to use another delimiter."""
    for other in set(DIVIDERS) - {by}:
        names = header[0].split(other)
        is_named = len(header) == 1 and (names == ["sep=", ""] or all(NAME.fullmatch(name.strip()) for name in names))
        if len(names) > 1 and (is_named or other == "\t"):
            raise DataError(
                f"{file}, line 1: one column, {header[0][:80]!r}: its names seem to be divided by {other!r}. Save it "
                "with commas as .csv, or with tabs as .tsv."
            )


def parquet_rows(file: Path, asker: Asker) -> Iterator[Any]:
    load_dataset = asker.package("datasets").load_dataset
    try:
        if asker.package("pyarrow.parquet").read_metadata(file).num_rows:
            yield from as_stored(load_dataset("parquet", data_files=str(file), split="train", streaming=True))
    except Exception as error:  # pyarrow and datasets have no common base
        why = str(error).splitlines()[0].rstrip(".")
        raise DataError(
            f"{file} is not a readable parquet file: {why}. If it is damaged, fetch or write it again."
        ) from error


def hub_rows(name: str, split: str, asker: Asker) -> Any:
    """Stream a data set of the Hub, NAME or NAME:SUBSET."""
    load_dataset = asker.package("datasets").load_dataset
    name, _, subset = name.partition(":")
    shown = f"{name!r} (split {split!r})"
    return _opened(shown, lambda: as_stored(load_dataset(name, subset or None, split=split, streaming=True)))


def as_stored(table: Any) -> Any:
    """Leave the images of a table of `datasets` encoded: each cell is a dictionary of bytes and path."""
    from datasets import Image

    for name, feature in (table.features or {}).items():
        if isinstance(feature, Image):
            table = table.cast_column(name, Image(decode=False))
    return table


def hub_version(name: str, asker: Asker) -> str:
    """Return the version of a data set: its revision on the Hub, or a hash of its local files."""
    name, _, subset = name.partition(":")
    if Path(name).exists():
        return content_of(sorted(file for file in Path(name).rglob("*") if file.is_file()) or [Path(name)])
    builder = asker.package("datasets").load_dataset_builder
    return str(_opened(repr(name), lambda: builder(name, subset or None)).cache_dir)


def _opened(shown: str, load: Callable[[], Any]) -> Any:
    failure = f"the data set {shown} cannot be opened from the Hugging Face Hub: {{error}}. Without a network, give a"
    return loaded(f"{failure} local file or folder.", load)


def loaded(failure: str, load: Callable[[], Any]) -> Any:
    """Return what `load` returns. Errors become DataErrors: {error} and {kind} in `failure` are their text and type."""
    try:
        with without_retry_messages():
            return load()
    except DataError:
        raise
    except Exception as error:  # `datasets` and the network raise many types
        cause = error
        if type(error).__name__.startswith("DatasetGeneration") and isinstance(error.__cause__, Exception):
            cause = error.__cause__
        told = (str(cause) or type(cause).__name__).splitlines()[0][:300].rstrip(".")
        raise DataError(failure.replace("{kind}", type(error).__name__).replace("{error}", told)) from error


def _saved(folder: Path, split: str, asker: Asker) -> Any:
    """Read a folder of `save_to_disk`: one set, or a split of several."""
    load = asker.package("datasets").load_from_disk
    found = loaded(f"{folder} is not a readable data set: {{error}}", lambda: load(str(folder)).with_format(None))
    if not isinstance(found, dict):
        return as_stored(found)
    if split not in found:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(found)}. Say {asker.split}.")
    return as_stored(found[split])
