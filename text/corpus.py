"""Running text as training data: documents kept apart, read as a stream of pieces and cut into sentences."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import (
    CSV,
    JSON,
    PARQUET,
    csv_rows,
    hub_rows,
    is_saved,
    json_rows,
    located_rows,
    parquet_rows,
)
from dipole.core.utils.text import counted
from dipole.text.splitting import READER, split_sentences, stretches
from dipole.text.text_files import characters, check_text

Unit = Literal["documents", "sentences"]
TEXT = (".txt", ".text", ".txt.gz", ".text.gz")
KINDS = TEXT + JSON + CSV + PARQUET
ALLOWED = ".txt, .jsonl, .csv, .tsv (each also .gz) and .parquet files, a folder of them or one that datasets saved"
USUAL = ("sentences", "text", "content", "document")
LONGEST = 1_000_000  # sentences of a document where rows are sentences and nothing says where a text ends
ROWS_TOGETHER = 10_000
LINE = 16_000_000  # characters of a line that may still be a sentence
LOOKED_AT = 100  # rows of a table by which its column of text is found


@dataclass(frozen=True)
class Document:
    """Sentences that belong together, in reading order.

    Args:
        name: of the document.
        sentences: its sentences.
    """

    name: str
    sentences: list[str]


@dataclass(frozen=True)
class Piece:
    """A part of a document: running text whose sentences are those of the document, or sentences.

    starts: whether a document begins with it.
    """

    name: str
    starts: bool
    content: str | list[str]

    def sentences(self) -> list[str]:
        return sentences_of(self.content)

    @property
    def holds(self) -> bool:
        """Whether there is a sentence in it."""
        return any(each.strip() for each in ([self.content] if isinstance(self.content, str) else self.content))


def sentences_of(content: str | list[str]) -> list[str]:
    """Sentences of a piece, blanks made single."""
    if isinstance(content, str):
        return split_sentences(content)
    return [sentence for sentence in (" ".join(each.split()) for each in content) if sentence]


def read_documents(
    source: str | Iterable[Any],
    *,
    unit: Unit = "documents",
    column: str | None = None,
    split: str = "train",
    encoding: str = "utf-8",
) -> Iterator[Document]:
    """Yield the documents of a corpus one by one.

    Args:
        source: see `read_pieces`.
        unit, column, split, encoding: see there too.

    Raises:
        DataError: nothing is there, or a file cannot be read; the message names the file.
    """
    return _documents(read_pieces(source, unit=unit, column=column, split=split, encoding=encoding))


def _documents(pieces: Iterable[Piece]) -> Iterator[Document]:
    name: str | None = None
    sentences: list[str] = []
    for piece in pieces:
        if piece.starts:
            if name is not None:
                yield Document(name, sentences)
            sentences = []
        name = piece.name
        sentences += piece.sentences()
    if name is not None:
        yield Document(name, sentences)


def read_pieces(
    source: str | Iterable[Any],
    *,
    unit: Unit = "documents",
    column: str | None = None,
    split: str = "train",
    encoding: str = "utf-8",
) -> Iterator[Piece]:
    """Yield a corpus in pieces of some megabytes at most, none of which is cut into sentences yet.

    Args:
        source: "pydoc" (the embedded default); a file or a folder of .txt (one document each), .jsonl, .csv, .tsv
            (each also .gz) or .parquet (one document a row); a folder that `datasets` saved; "hub:NAME" (or
            "hub:NAME:SUBSET") for a data set of the Hugging Face Hub, streamed; or any iterable of rows: strings,
            lists of sentences, or mappings.
        unit: "documents": a row or text file is running text to be cut into sentences; "sentences": a row or a line
            of a text file is one sentence, and neighbouring rows are neighbours (BookCorpus as the Hub has it).
        column: which column of a row holds the text (a string, or a list of sentences); found by itself if it is
            called text, sentences, content or document, or is the only column of a CSV file that holds text.
        split: of a Hub data set.
        encoding: of text and CSV files.

    Raises:
        DataError: nothing is there, or a file cannot be read; the message names the file.
    """
    if not isinstance(source, str):
        yield from _rows(_numbered(source, "the given rows"), unit, column)
    elif source == "pydoc":
        yield from (Piece(document.name, True, document.sentences) for document in pydoc_documents())
    elif source.startswith("hub:"):
        yield from _rows(_numbered(hub_rows(source.removeprefix("hub:"), split, READER), source), unit, column)
    elif is_saved(Path(source)):
        yield from _rows(located_rows(source, split, encoding, READER), unit, column)
    else:
        files = corpus_files(source)
        for file in files:
            holds = False
            for piece in pieces_of(file, unit, column, encoding) if file.stat().st_size else ():
                holds = holds or piece.holds
                yield piece
            if not holds and len(files) == 1:
                raise DataError(f"{file} is empty: it holds no sentence")
            if not holds:
                warnings.warn(f"{file} is empty and is left out", stacklevel=2)


def corpus_files(source: str) -> list[Path]:
    """The files of a local corpus, in their order; those of another kind in a folder are left out with a warning.

    Raises:
        DataError: there are none, or a single file is of no kind that is read.
    """
    path = Path(source)
    if not path.exists():
        raise DataError(f"no corpus at {path}. Give {ALLOWED}, hub:NAME, or pydoc.")
    if not path.is_dir():
        check_kind(path)
        return [path]
    there = sorted(p for p in path.rglob("*") if not p.name.startswith("."))
    every = [p for p in there if p.is_file()]
    files = [p for p in every if _ends(p, KINDS)]
    lost = [p for p in there if p.is_symlink() and not p.exists()]
    if lost:
        warnings.warn(
            f"{lost[0]} leads nowhere and is left out ({counted(len(lost), 'such link')} in {path})", stacklevel=3
        )
    if not files:
        raise DataError(f"the folder {path} holds no {', '.join(TEXT[:1] + JSON[:2] + CSV[:1] + PARQUET)} file")
    if others := sorted({p.suffix or p.name for p in every} - {p.suffix for p in files}):
        shown = ", ".join(others[:5])
        warnings.warn(f"{path}: files of other kinds are no text and are left out ({shown})", stacklevel=3)
    return files


def check_kind(file: Path) -> None:
    """Raise DataError where a file's name says that it is none of the kinds that are read."""
    if not _ends(file, KINDS):
        raise DataError(
            f"{file} is not read as text: a corpus is read from {ALLOWED}, or hub:NAME. If it is plain text, name it "
            f"{file.name.split('.')[0] or file.name}.txt."
        )
    if not file.is_file():
        raise DataError(f"{file} is neither a file nor a folder. A corpus is read from {ALLOWED}, or hub:NAME.")


def _ends(file: Path, suffixes: tuple[str, ...]) -> bool:
    return file.name.lower().endswith(suffixes)


def labelled_documents(source: str, column: str | None = None) -> Iterator[tuple[Document, str, bool]]:
    """Yield documents with their class, and whether they are for testing.

    Args:
        source: a .jsonl, .jsonl.gz or .parquet file whose rows have a `label` besides the text, or "hub:NAME" with the
            splits train and test. A row of a file says its `split`, train or test; where none does, every fifth
            document of a class is for testing.
        column: which column holds the text, as in `read_documents`.

    Raises:
        DataError: as `read_documents`, or for a row without a label; the message names it.
    """
    if source.startswith("hub:"):
        name = source.removeprefix("hub:")
        parts: list[tuple[str, Iterable[Any]]] = [(split, hub_rows(name, split, READER)) for split in ("train", "test")]
    else:
        path = Path(source)
        if not path.is_file() or not path.name.endswith(JSON + PARQUET):
            raise DataError(
                f"no labelled documents at {path}. Give a {', '.join(JSON[:2] + PARQUET)} file, or hub:NAME."
            )
        parts = [
            ("", parquet_rows(path, READER) if path.name.endswith(PARQUET) else (row for _, row in json_rows(path)))
        ]
    seen: dict[str, int] = {}
    for part, rows in parts:
        for number, row in enumerate(rows, 1):
            where = f"{source}{f', split {part}' if part else ''}, row {number}"
            if not isinstance(row, dict) or row.get("label") is None:
                has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise DataError(f"{where}: no column 'label'; it has {has}.")
            split = part or row.get("split")
            if split not in ("train", "test", None):
                raise DataError(f"{where}: split must be train or test, got {split!r}.")
            label = str(row["label"])
            seen[label] = seen.get(label, 0) + 1
            value = _cell(row, where, column)
            sentences = sentences_of(value)
            if sentences:
                is_test = seen[label] % 5 == 0 if split is None else split == "test"
                yield Document(str(row.get("id", number)), sentences), label, is_test


def documents_of(file: Path, unit: Unit, column: str | None, encoding: str) -> Iterator[Document]:
    """The documents of one file; what is neither JSON, CSV nor parquet is text."""
    return _documents(pieces_of(file, unit, column, encoding))


def pieces_of(file: Path, unit: Unit, column: str | None, encoding: str) -> Iterator[Piece]:
    """The pieces of one file; what is neither JSON, CSV nor parquet is text."""
    if _ends(file, PARQUET):
        yield from _rows(_numbered(parquet_rows(file, READER), str(file)), unit, column)
    elif _ends(file, JSON):
        yield from _rows(_numbered((row for _, row in json_rows(file)), str(file)), unit, column)
    elif _ends(file, CSV):
        check_text(file, encoding, ALLOWED)
        rows = csv_rows(file, encoding, READER)
        first = list(islice(rows, LOOKED_AT))
        if first:
            yield from _rows(chain(first, rows), unit, column or _column_of(first[0][0], [row for _, row in first]))
    else:
        name = (file.stem if _ends(file, (".gz",)) else file.name).rpartition(".")[0] or file.name
        text = characters(file, encoding, ALLOWED)
        starts = True
        for content in _lines(text, file) if unit == "sentences" else stretches(text):
            yield Piece(name, starts, content)
            starts = False
        if starts:
            yield Piece(name, True, [])


def _lines(chunks: Iterable[str], file: Path) -> Iterator[list[str]]:
    """Lines of a stream, some thousands at a time."""
    rest: list[str] = []
    for chunk in chunks:
        if "\n" not in chunk:
            rest.append(chunk)
            if sum(map(len, rest)) > LINE:
                raise DataError(
                    f"{file} has a line of more than {LINE:,} characters, and with text.unit = 'sentences' a line is "
                    f"one sentence. Put each on a line of its own, or set text.unit = 'documents'."
                )
            continue
        *lines, last = "".join([*rest, chunk]).split("\n")
        rest = [last]
        yield lines
    if last_line := "".join(rest):
        yield [last_line]


def _numbered(rows: Iterable[Any], where: str) -> Iterator[tuple[str, Any]]:
    return ((f"{where}, row {number}", row) for number, row in enumerate(rows, 1))


def _rows(rows: Iterable[tuple[str, Any]], unit: Unit, column: str | None) -> Iterator[Piece]:
    together: list[str] = []
    of_document, number = 0, 0
    for number, (where, row) in enumerate(rows, 1):
        value = _cell(row, where, column)
        if unit == "documents":
            yield Piece(str(row.get("id", number)) if isinstance(row, dict) else str(number), True, value)
            continue
        together += [value] if isinstance(value, str) else value
        if of_document + len(together) >= LONGEST or len(together) >= ROWS_TOGETHER:
            yield Piece(str(number), not of_document, together)
            of_document += len(together)
            of_document = 0 if of_document >= LONGEST else of_document
            together = []
    if together:
        yield Piece("end", not of_document, together)


def _column_of(where: str, rows: Sequence[dict[str, str]]) -> str:
    """The column of a CSV file that holds text: one with a usual name, or the only one that is not of numbers."""
    names = list(rows[0])
    usual = next((name for name in USUAL if name in names), None)
    if usual is not None:
        return usual
    texts = [name for name in names if not all(_is_number(row[name]) for row in rows)] if len(names) > 1 else names
    if len(texts) != 1:
        said = f"several columns may hold the text: {', '.join(texts)}" if texts else "no column holds text"
        raise DataError(f"{where}: {said} (the file has {', '.join(names)}). Say text.column.")
    return texts[0]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell.strip()
    return True


def _cell(row: Any, where: str, column: str | None) -> str | list[str]:
    value = row
    if isinstance(row, dict):
        name = column or next((usual for usual in USUAL if usual in row), None)
        if name not in row:
            raise DataError(
                f"{where}: no column {column or 'text'!r}; it has {', '.join(map(str, row))}. Say text.column."
            )
        value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return list(value)
    raise DataError(f"{where}: expected a text or a list of sentences, got {type(value).__name__}")


def pydoc_documents() -> Iterator[Document]:
    """Read the help topics of Python's own `pydoc_data`: English prose, each topic a document and a class.

    Returns:
        One document a topic, by name; code, grammar rules and rulers are left out.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        lines = []
        for line in topics[name].splitlines():
            # Rulers, grammar rules and code are no prose.
            code = line.startswith("      ") or re.search(r"::=|>>>|^\s*\.\.\.|^[*=~-]+\s*$", line)
            lines.append("" if code else re.sub(r"[`*|]+", "", line))
        prose = [
            s
            for s in split_sentences(re.sub(r"(?<=\w)-\n\s*(?=\w)", "-", "\n".join(lines)))
            if len(re.findall(r"[A-Za-z]{2,}", s)) >= 3
        ]
        if len(prose) >= 5:
            yield Document(name, prose)
