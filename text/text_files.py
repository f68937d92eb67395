"""Open text files: plain or packed, in any encoding. Binary files are rejected."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import DAMAGED, codec_of, open_bytes

LOOKED_AT = 1 << 16  # bytes at the start of a file
# Bytes that no text in an 8-bit encoding or in UTF-8 has, but for a stray one: control characters without blanks and
# escape.
CONTROL = bytes({*range(32)} - {*b"\t\n\v\f\r\x1a\x1b"})
STRANGE = re.compile(f"[{re.escape(CONTROL.decode())}]")
STRAY = 0.005
MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte-order marks of encodings with several bytes a character."""
BINARY_STARTS = {
    b"\x1f\x8b": "a gzip file",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\x00": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstandard file",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"%PDF-": "a PDF document",
    b"PAR1": "a parquet file",
}


@contextmanager
def open_text(file: Path, encoding: str, allowed: str) -> Iterator[TextIO]:
    """Open a file of text without its byte-order mark, unpacked. `allowed` names readable files for messages."""
    codec = codec_of(encoding, file)
    try:
        if not codec.startswith(("utf-16", "utf-32")):
            with open_bytes(file) as raw:
                _check_start(raw.read(LOOKED_AT), file, encoding, allowed)
        with open_bytes(file) as raw:
            text = io.TextIOWrapper(raw, codec)
            try:
                yield text
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not {encoding}: byte {raw.tell() - len(error.object) + error.start} is "
                    f"{error.object[error.start]:#04x}. Set text.encoding, for example 'latin-1' or 'cp1252'."
                ) from None
            finally:
                text.close()
    except DAMAGED as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def refuse_binary(text: str, file: Path) -> None:
    """Raise DataError if a later part of a text file is binary data."""
    if len(STRANGE.findall(text)) > STRAY * len(text):
        raise DataError(f"{file} holds no text: after its beginning, it is binary data. Is the file damaged?")


def _check_start(start: bytes, file: Path, encoding: str, allowed: str) -> None:
    wide = next((name for mark, name in MARKS.items() if start.startswith(mark)), None)
    if wide is not None:
        raise DataError(f"{file} is not {encoding}: it begins as {wide} does. Set text.encoding = '{wide}'.")
    kind = next((kind for mark, kind in BINARY_STARTS.items() if start.startswith(mark)), None)
    strange = len(start) - len(start.translate(None, CONTROL))
    if kind is None and (b"\0" in start or strange > STRAY * len(start)):
        kind = "binary data"
    if kind is not None:
        raise DataError(
            f"{file} holds no text: it is {kind}, whatever its name says. A corpus is read from {allowed}, or hub:NAME."
        )
