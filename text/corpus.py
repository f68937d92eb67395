"""Read running text: files, folders and data sets as a stream of pieces, with document boundaries."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TextIO

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import (
    ALSO_PACKED,
    CSV,
    DAMAGED,
    JSON,
    PARQUET,
    ROWS,
    Located,
    codec_of,
    ends_with,
    is_saved,
    located_rows,
    note_splits,
    open_bytes,
    require_columns,
    texts_in,
    unpacked_name,
    visible,
)
from dipole.core.utils.text import counted, warn
from dipole.text.splitting import READER, paragraphs, punkt, split_sentences

Unit = Literal["documents", "sentences"]
TEXT = (".txt", ".text")
READ = TEXT + ROWS
ALLOWED = f".txt, .jsonl, .csv, .tsv {ALSO_PACKED} and .parquet files, a folder of them or one that datasets saved"
TEXT_COLUMNS = ("sentences", "text", "content", "document")
LONGEST_DOCUMENT = 1_000_000  # sentences of a document, where rows are sentences and no text ends
ROWS_TOGETHER = 1000
LONGEST_LINE = 16_000_000  # characters of a line that can still be a sentence
ROWS_LOOKED_AT = 100  # rows of a CSV file that decide which column holds the text
PIECE = 1_000_000  # characters of a text file that are read together
LOOKED_AT = 1 << 16  # bytes at the start of a file
# Bytes that no text in an 8-bit encoding or in UTF-8 has, but for a stray one: control characters without blanks and
# escape.
CONTROL = bytes({*range(32)} - {*b"\t\n\v\f\r\x1a\x1b"})
STRANGE = re.compile(f"[{re.escape(CONTROL.decode())}]")
STRAY = 0.005
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte-order marks of encodings with several bytes a character."""
BINARY_STARTS = {
    b"\x1f\x8b": "a gzip file", b"PK\x03\x04": "a zip archive", b"BZh": "a bzip2 file", b"\xfd7zXZ\x00": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstandard file", b"\x89PNG": "an image", b"\xff\xd8\xff": "an image",
    b"%PDF-": "a PDF document", b"PAR1": "a parquet file",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One text.

    Args:
        name: of the document, unique in its corpus or not.
        sentences: in reading order.
    """

    name: str
    sentences: list[str]


@dataclass(frozen=True)
class Piece:
    """Part of a document: running text, or a sentence in each line. `starts` is True for the first part."""

    name: str
    starts: bool
    text: str
    is_lines: bool = False


def sentences_of(text: str, is_lines: bool) -> list[str]:
    """Cut text into sentences, or at its line breaks. Runs of blanks become one blank."""
    if not is_lines:
        return split_sentences(text)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return [line for line in lines if line]


def documents_of(pieces: Iterable[Piece]) -> Iterator[Document]:
    document: Document | None = None
    for piece in pieces:
        if document is None or piece.starts:
            if document is not None:
                yield document
            document = Document(piece.name, [])
        document.sentences.extend(sentences_of(piece.text, piece.is_lines))
    if document is not None:
        yield document


def read_pieces(
    source: str | Iterable[Any],
    *,
    unit: Unit = "documents",
    column: str | None = None,
    split: str = "train",
    encoding: str = "utf-8",
) -> Iterator[Piece]:
    """Yield a corpus in pieces of a few megabytes, not yet cut into sentences. Settings are those of [text].

    The source can also be rows: strings, lists of sentences, or mappings. With the unit "sentences" a row, or a line of
    a text file, is one sentence, and consecutive rows are neighbours. The column is by default one with a usual name,
    or the only column of a CSV file that is not numeric. Raise DataError if the source is missing or cannot be read.
    """
    if not isinstance(source, str):
        rows = ((f"the given rows, row {number}", row) for number, row in enumerate(source, 1))
        yield from _row_pieces(rows, unit, column)
    elif source == "pydoc":
        for document in pydoc_documents():
            yield Piece(document.name, True, "\n".join(document.sentences), is_lines=True)
    elif source.startswith("hub:") or is_saved(Path(source)):
        yield from _row_pieces(located_rows(source, split, encoding, READER), unit, column)
    else:
        files = corpus_files(source)
        note_splits(Path(source), files)
        for file in files:
            is_empty = True
            if file.stat().st_size:
                for piece in file_pieces(file, unit, column, encoding):
                    is_empty = is_empty and not piece.text.strip()
                    yield piece
            if is_empty and len(files) == 1:
                raise DataError(f"{file} is empty: it holds no sentence")
            if is_empty:
                warn(f"{file} is empty and is skipped")


def corpus_files(source: str) -> list[Path]:
    """List the files of a local corpus in order. Other kinds of files in a folder are skipped with a warning."""
    path = Path(source)
    if not path.exists():
        raise DataError(f"no corpus at {path}. Give {ALLOWED}, hub:NAME, or pydoc.")
    if not path.is_dir():
        if not ends_with(path, READ):
            name = path.name.split(".")[0] or path.name
            raise DataError(
                f"{path} is not read as text: a corpus is read from {ALLOWED}, or hub:NAME. If it is plain text, name "
                f"it {name}.txt."
            )
        if not path.is_file():
            raise DataError(f"{path} is neither a file nor a folder. A corpus is read from {ALLOWED}, or hub:NAME.")
        return [path]
    entries = visible(path)
    every = [p for p in entries if p.is_file()]
    files = [p for p in every if ends_with(p, READ)]
    broken = [p for p in entries if p.is_symlink() and not p.exists()]
    if broken:
        links = counted(len(broken), "broken link")
        warn(f"{broken[0]} is a broken link and is skipped ({links} in {path})", stacklevel=3)
    if not files:
        raise DataError(f"the folder {path} holds no {', '.join(TEXT[:1] + JSON[:2] + CSV[:1] + PARQUET)} file")
    if others := sorted({p.suffix or p.name for p in every} - {p.suffix for p in files}):
        warn(f"{path}: files that hold no text are skipped ({', '.join(others[:5])})", stacklevel=3)
    return files


def file_pieces(file: Path, unit: Unit, column: str | None, encoding: str) -> Iterator[Piece]:
    """Yield the pieces of one file. A file that is neither JSON, CSV nor parquet is read as text."""
    if not ends_with(file, ROWS):
        yield from _text_pieces(file, unit, encoding)
        return
    rows = located_rows(str(file), "train", encoding, READER)
    if ends_with(file, CSV):
        with _open_text(file, encoding):  # refuse binary files
            pass
        first = list(islice(rows, ROWS_LOOKED_AT))
        if first:
            column = column or _text_column(first[0][0], [row for _, row in first])
        rows = chain(first, rows)
    yield from _row_pieces(rows, unit, column)


def _text_pieces(file: Path, unit: Unit, encoding: str) -> Iterator[Piece]:
    name = unpacked_name(file).rpartition(".")[0] or file.name
    is_lines = unit == "sentences"
    starts = True
    waiting: list[str] = []

    def piece() -> Piece:
        if len(STRANGE.findall("".join(waiting))) > STRAY * sum(map(len, waiting)):
            raise DataError(f"{file} holds no text: after its beginning, it is binary data. Is the file damaged?")
        return Piece(name, starts, "\n\n".join(waiting), is_lines)

    with _open_text(file, encoding) as text:
        size = 0
        parts = _lines(text, file) if is_lines else paragraphs(text)
        for part in parts:
            waiting.append(part)
            size += len(part)
            if size >= PIECE:
                yield piece()
                starts, waiting, size = False, [], 0
        if starts or size:
            yield piece()


@contextmanager
def _open_text(file: Path, encoding: str) -> Iterator[TextIO]:
    """Open a file of text without its byte-order mark, unpacked. Raise DataError for binary data."""
    codec = codec_of(encoding, file)
    try:
        if not codec.startswith(("utf-16", "utf-32")):
            with open_bytes(file) as raw:
                _check_start(raw.read(LOOKED_AT), file, encoding)
        with open_bytes(file) as raw, TextIOWrapper(raw, codec) as text:
            try:
                yield text
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not {encoding}: byte {raw.tell() - len(error.object) + error.start} is "
                    f"{error.object[error.start]:#04x}. Set text.encoding, for example 'latin-1' or 'cp1252'."
                ) from None
            except UnicodeError as error:  # UTF-16 without its mark
                raise DataError(f"{file} is not {encoding}: {error}. Set text.encoding, for example 'utf-8'.") from None
    except DAMAGED as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_start(start: bytes, file: Path, encoding: str) -> None:
    wide = next((name for mark, name in MARKS.items() if start.startswith(mark)), None)
    if wide is not None:
        raise DataError(f"{file} is not {encoding}: it begins as {wide} does. Set text.encoding = '{wide}'.")
    kind = next((kind for mark, kind in BINARY_STARTS.items() if start.startswith(mark)), None)
    strange = len(start) - len(start.translate(None, CONTROL))
    if kind is None and (b"\0" in start or strange > STRAY * len(start)):
        kind = "binary data"
    if kind is not None:
        raise DataError(
            f"{file} holds no text: it is {kind}, whatever its name says. A corpus is read from {ALLOWED}, or hub:NAME."
        )


def _lines(text: TextIO, file: Path) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{file} has a line of more than {LONGEST_LINE:,} characters, and with text.unit = 'sentences' a "
                f"line is one sentence. Put each on its own line, or set text.unit = 'documents'."
            )
        yield line


def _row_pieces(rows: Iterable[Located], unit: Unit, column: str | None) -> Iterator[Piece]:
    """Yield a piece for each row, or for some thousands of rows where each row is a sentence."""
    pieces = (row_piece(row, where, column, number) for number, (where, row) in enumerate(rows, 1))
    if unit == "documents":
        yield from pieces
        return
    of_document = 0
    while together := list(islice(pieces, ROWS_TOGETHER)):
        sentences: list[str] = []
        for piece in together:
            parts = piece.text.split("\n") if piece.is_lines else [piece.text]
            sentences += [" ".join(part.split()) for part in parts]  # a line break inside a sentence becomes a blank
        yield Piece(together[-1].name, not of_document, "\n".join(sentences), is_lines=True)
        of_document += len(sentences)
        if of_document >= LONGEST_DOCUMENT:
            of_document = 0


def _text_column(where: str, rows: Sequence[dict[str, str]]) -> str:
    """Find the column of a CSV file that holds text: one with a usual name, or the only one that is not numeric."""
    names = list(rows[0])
    texts = [name for name in TEXT_COLUMNS if name in names][:1] or names
    if len(texts) > 1:
        texts = [name for name in names if not all(_is_number(row[name]) for row in rows)]
    if len(texts) == 1:
        return texts[0]
    problem = f"several columns may hold the text: {', '.join(texts)}" if texts else "no column holds text"
    raise DataError(f"{where}: {problem} (the file has {', '.join(names)}). Set text.column.")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell.strip()
    return True


def row_piece(row: Any, where: str, column: str | None, number: int) -> Piece:
    """Return the text of a row: a string, or a list of sentences. A missing one (null, NaN) is empty."""
    value, name = row, str(number)
    if isinstance(row, dict):
        column = column or next((usual for usual in TEXT_COLUMNS if usual in row), "text")
        require_columns(row, [column], where, " Set text.column.")
        value, name = row[column], str(row.get("id", number))
    if isinstance(value, str):
        return Piece(name, True, value)
    return Piece(name, True, "\n".join(texts_in(value, column or "text", where)), is_lines=True)


def pydoc_documents() -> Iterator[Document]:
    """Read the help topics of Python's own `pydoc_data`, English prose, without code, grammar rules and rulers.

    Returns:
        A document for each topic, by name.

    Example:
        >>> next(pydoc_documents()).name
        'assert'
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        lines = []
        for line in topics[name].splitlines():
            if line.startswith("      ") or re.search(r"::=|>>>|^\s*\.\.\.|^[*=~-]+\s*$", line):
                line = ""  # code
            lines.append(re.sub(r"[`*|]+", "", line))
        text = re.sub(r"(?<=\w)-\n\s*(?=\w)", "-", "\n".join(lines))
        # Not by `split_sentences`, which knows lists: these are the sentences of earlier results.
        every = chain.from_iterable(punkt().tokenize(" ".join(part.split())) for part in paragraphs(StringIO(text)))
        sentences = [s for s in every if len(re.findall(r"[A-Za-z]{2,}", s)) >= 3]
        if len(sentences) >= 5:
            yield Document(name, sentences)
