"""Text files as a stream of characters: plain or packed, in any encoding. Binary files are rejected."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from dipole.core.utils.errors import DataError

READ = 1 << 20  # bytes
LOOKED_AT = 1 << 16
# Bytes that no text in an 8-bit encoding or in UTF-8 has, but for a stray one: control characters without blanks and
# escape.
CONTROL = bytes({*range(32)} - {*b"\t\n\v\f\r\x1a\x1b"})
STRAY = 0.005
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte-order marks of encodings with several bytes a character."""
KINDS = {
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\x00": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstandard file",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"%PDF-": "a PDF document",
    b"PAR1": "a parquet file",
    b"ARROW1": "an arrow file",
    b"\x93NUMPY": "a numpy file",
    b"\x7fELF": "a program",
}


def characters(file: Path, encoding: str, allowed: str) -> Iterator[str]:
    """Yield the text of a file in parts, line breaks made "\\n", without a byte-order mark. `.gz` is unpacked.

    Args:
        allowed: names the kinds of files that can be read, for messages.

    Raises:
        DataError: it is no text, not in that encoding, or cannot be read. The message names the file.
    """
    try:
        decode = codecs.getincrementaldecoder(encoding)()
        "".encode(encoding)  # there are codecs from bytes to bytes
    except LookupError:
        raise DataError(
            f"{file}: there is no encoding {encoding!r}; 'utf-8', 'latin-1' and 'cp1252' are the usual ones."
        ) from None
    lines = io.IncrementalNewlineDecoder(decode, translate=True)
    position = 0
    try:
        with _opened(file) as stream:
            while data := stream.read(READ):
                _check(data, file, encoding, allowed, first=not position)
                pending = len(decode.getstate()[0])
                text = lines.decode(data)
                if position == 0:
                    text = text.removeprefix("\ufeff")  # a byte-order mark is no word
                position += len(data)
                yield text
            pending, data = len(decode.getstate()[0]), b""
            yield lines.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not {encoding}: byte {position - pending + error.start} is "
            f"{error.object[error.start]:#04x}. Set text.encoding, for example 'latin-1' or 'cp1252'."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def check_text(file: Path, encoding: str, allowed: str) -> None:
    """Raise DataError if a file does not begin like text. A file that cannot be opened is left to its reader."""
    with suppress(OSError, EOFError, zlib.error, LookupError), _opened(file) as stream:
        _check(stream.read(LOOKED_AT), file, encoding, allowed, first=True)


def _opened(file: Path) -> BinaryIO:
    if file.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(file))
    return open(file, "rb")


def _check(data: bytes, file: Path, encoding: str, allowed: str, *, first: bool) -> None:
    if codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return
    kind = None
    if _strange(data) > STRAY * READ:
        kind = "binary data"
    if first:
        wide = next((name for mark, name in MARKS.items() if data.startswith(mark)), None)
        if wide is not None:
            raise DataError(f"{file} is not {encoding}: it begins as {wide} does. Set text.encoding = '{wide}'.")
        start = data[:LOOKED_AT]
        if b"\0" in start or _strange(start) > STRAY * len(start):
            kind = "binary data"
        kind = next((kind for mark, kind in KINDS.items() if data.startswith(mark)), kind)
    if kind is not None:
        raise DataError(
            f"{file} holds no text: it is {kind}, whatever its name says. A corpus is read from {allowed}, or hub:NAME."
        )


def _strange(data: bytes) -> int:
    """Count bytes that do not occur in text."""
    return len(data) - len(data.translate(None, CONTROL))
