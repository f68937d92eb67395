"""Running text as training data: documents kept apart, cut into sentences."""

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dipole.core.ground.errors import DataError
from dipole.core.ground.rows import JSON, PARQUET, Asker, hub_rows, json_rows, parquet_rows

Unit = Literal["documents", "sentences"]
READER = Asker("text", "text.split", "text.encoding")
TEXT = (".txt", ".text")
# A longer piece of text is cut at a blank before sentences are sought in it: no sentence is that long, files are.
PIECE = 100_000
LONGEST = 1_000_000  # sentences of a document where rows are sentences and nothing says where a text ends


@dataclass(frozen=True)
class Document:
    """Sentences that belong together, in reading order."""

    name: str
    sentences: list[str]


# Sentences -----------------------------------------------------------------------------------------------------------

ABBREVIATIONS = (
    "mr mrs ms dr prof rev hon st sr jr messrs mme mlle gen col maj capt lieut lt sgt cpl gov pres sen rep "
    "vs etc e.g i.e cf al viz no vol vols pp ed eds fig figs sec eq ch inc ltd co corp bros dept univ "
    "jan feb mar apr jun jul aug sep sept oct nov dec mt ft a.m p.m b.c a.d u.s u.k esq"
)


@cache
def _punkt() -> Any:
    punkt = READER.package("nltk.tokenize.punkt")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS.split())
    return punkt.PunktSentenceTokenizer(parameters)


def split_sentences(text: str) -> list[str]:
    """Cut running text into sentences with NLTK's Punkt and a fixed list of English abbreviations (no model download).

    Blank lines end a sentence; other line breaks are blanks.
    """
    out = []
    for paragraph in re.split(r"\n\s*\n", text):
        for piece in _pieces(" ".join(paragraph.split())):
            out += _punkt().tokenize(piece)
    return [sentence for sentence in out if sentence]


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind(" ", start, start + PIECE)
        end = end if end > start else start + PIECE
        yield text[start:end].strip()
        start = end
    if start < len(text):
        yield text[start:].strip()


# Documents -----------------------------------------------------------------------------------------------------------


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
        source: "pydoc" (the embedded default); a file or a folder of .txt (one document each), .jsonl, .jsonl.gz or
            .parquet (one document a row); "hub:NAME" (or "hub:NAME:SUBSET") for a data set of the Hugging Face Hub,
            streamed; or any iterable of rows: strings, lists of sentences, or mappings.
        unit: "documents": a row or text file is running text to be cut into sentences; "sentences": a row or a line
            of a text file is one sentence, and neighbouring rows are neighbours (BookCorpus as the Hub has it).
        column: which column of a row holds the text (a string, or a list of sentences); found by itself if it is
            called text, sentences, content or document.
        split: of a Hub data set.
        encoding: of text files.

    Raises:
        DataError: nothing is there, or a file cannot be read; the message names the file.
    """
    if not isinstance(source, str):
        yield from _rows(source, "the given rows", unit, column)
    elif source == "pydoc":
        yield from pydoc_documents()
    elif source.startswith("hub:"):
        yield from _rows(hub_rows(source.removeprefix("hub:"), split, READER), source, unit, column)
    else:
        path = Path(source)
        if not path.exists():
            raise DataError(
                f"no corpus at {path}. Give a file or folder of {', '.join(TEXT[:1] + JSON[:2] + PARQUET)}, "
                f"hub:NAME, or pydoc."
            )
        files = (
            [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.name.endswith(TEXT + JSON + PARQUET))
        )
        if not files:
            raise DataError(f"the folder {path} holds no {', '.join(TEXT[:1] + JSON[:2] + PARQUET)} file")
        for file in files:
            holds = False
            for document in documents_of(file, unit, column, encoding) if file.stat().st_size else ():
                holds |= bool(document.sentences)
                yield document
            if not holds and len(files) == 1:
                raise DataError(f"{file} is empty: it holds no sentence")
            if not holds:
                warnings.warn(f"{file} is empty and is left out", stacklevel=2)


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
            sentences = [s for s in (value if isinstance(value, list) else split_sentences(value)) if s.strip()]
            if sentences:
                is_test = seen[label] % 5 == 0 if split is None else split == "test"
                yield Document(str(row.get("id", number)), sentences), label, is_test


def documents_of(file: Path, unit: Unit, column: str | None, encoding: str) -> Iterator[Document]:
    """The documents of one file; what is neither JSON nor parquet is text."""
    if file.name.endswith(PARQUET):
        yield from _rows(parquet_rows(file, READER), str(file), unit, column)
    elif file.name.endswith(JSON):
        yield from _rows((row for _, row in json_rows(file)), str(file), unit, column)
    else:
        try:
            text = file.read_text(encoding=encoding)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is not {encoding}: byte {error.start} is {error.object[error.start]:#04x}. "
                f"Say text.encoding, for example 'latin-1' or 'cp1252'."
            ) from None
        except LookupError:
            raise DataError(
                f"{file}: there is no encoding {encoding!r}; 'utf-8', 'latin-1' and 'cp1252' are the usual ones."
            ) from None
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        text = text.removeprefix("\ufeff")  # a byte-order mark is no word
        if unit == "sentences":
            yield Document(file.stem, [" ".join(line.split()) for line in text.split("\n") if line.strip()])
        else:
            yield Document(file.stem, split_sentences(text))


def _rows(rows: Iterable[Any], where: str, unit: Unit, column: str | None) -> Iterator[Document]:
    single: list[str] = []
    for number, row in enumerate(rows, 1):
        value = _cell(row, f"{where}, row {number}", column)
        if unit == "sentences":
            single += value if isinstance(value, list) else [" ".join(value.split())]
            if len(single) >= LONGEST:
                yield Document(f"{number}", [s for s in single if s])
                single = []
            continue
        sentences = value if isinstance(value, list) else split_sentences(value)
        name = str(row.get("id", number)) if isinstance(row, dict) else str(number)
        yield Document(name, [s for s in sentences if s.strip()])
    if single:
        yield Document("end", [s for s in single if s])


def _cell(row: Any, where: str, column: str | None) -> str | list[str]:
    value = row
    if isinstance(row, dict):
        name = column or next((c for c in ("sentences", "text", "content", "document") if c in row), None)
        if name not in row:
            raise DataError(
                f"{where}: no column {column or 'text'!r}; it has {', '.join(map(str, row))}. Say text.column."
            )
        value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return [" ".join(each.split()) for each in value]
    raise DataError(f"{where}: expected a text or a list of sentences, got {type(value).__name__}")


def pydoc_documents() -> Iterator[Document]:
    """Read the help topics of Python's own `pydoc_data`: English prose, each topic a document and a class."""
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
