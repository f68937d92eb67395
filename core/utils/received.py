"""Files that somebody else may have written, read so that none of them can hang, fill the memory or say two things.

Only regular files are opened; sizes, lines and nesting have limits; JSON is what RFC 8259 allows: a name once in an
object, no NaN or Infinity, no half of a surrogate pair.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from dipole.core.utils.errors import ReceivedError
from dipole.core.utils.files import why

LARGEST = 64 * 2**20
"""Bytes of a file that is read as a whole."""
LARGEST_TOML = 2**18
LONGEST_LINE = 2**20
"""Bytes of a line of a file that is read line by line."""
DEEPEST = 64
"""Lists and tables within each other."""
_STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_DOTTED = re.compile(r"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*){64}""")
"""So many dots in a key are as many tables within each other."""


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        ReceivedError: it is missing, a folder, pipe, socket or device, too large, or cannot be read; the message
            begins with its path.
    """
    with _opened(path) as file:
        try:
            content = file.read(most + 1)
        except (OSError, MemoryError) as error:
            raise ReceivedError(path, f"cannot be read: {_why(error)}") from error
    if len(content) > most:
        raise ReceivedError(path, f"is damaged: it has more than {most} bytes")
    return content


def read_start(path: Path, count: int) -> bytes:
    """The first bytes of a regular file, whatever its size; ReceivedError as for `read_bytes`."""
    with _opened(path) as file:
        try:
            return file.read(count)
        except OSError as error:
            raise ReceivedError(path, f"cannot be read: {_why(error)}") from error


def read_end(path: Path, count: int) -> bytes:
    """The last bytes of a regular file, whatever its size; ReceivedError as for `read_bytes`."""
    with _opened(path) as file:
        try:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            return file.read(count)
        except OSError as error:
            raise ReceivedError(path, f"cannot be read: {_why(error)}") from error


def read_text(path: Path, most: int = LARGEST) -> str:
    """The content of a regular file in UTF-8; ReceivedError as for `read_bytes`."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ReceivedError(path, f"is damaged: not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: Path, most: int = LARGEST) -> Any:
    """The value that a file of JSON holds; ReceivedError says what is wrong with it."""
    text = read_text(path, most)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ReceivedError(path, f"is damaged: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The tables that a file of TOML holds; ReceivedError says what is wrong with it."""
    content = read_bytes(path, LARGEST_TOML)
    try:
        return parse_toml(content.decode())
    except ValueError as error:
        raise ReceivedError(path, f"is not valid TOML: {error}") from error


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file, one after another.

    Raises:
        ReceivedError: as for `read_bytes`, and for a line of more than `LONGEST_LINE` bytes.
    """
    with _opened(path) as file:
        try:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise ReceivedError(path, f"is damaged: a line has more than {LONGEST_LINE} bytes")
                yield line
        except OSError as error:
            raise ReceivedError(path, f"cannot be read: {_why(error)}") from error


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, is nested too deeply, has a name twice in an object, a number that no float holds, or
            half a surrogate pair.
    """
    if isinstance(text, bytes):
        text = text.decode()
    check_depth(text)
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is no text") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST}") from None
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    if _DOTTED.search(text):
        raise ValueError(f"nested deeper than {DEEPEST}")
    check_depth(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST}") from None


def check_depth(text: str) -> None:
    """Refuse brackets within brackets beyond `DEEPEST` with a ValueError, before anything is built from them."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        char = found[0][0]
        depth += (char in "[{") - (char in "]}")
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without waiting for the other end of a pipe and without touching a device."""
    try:
        _check_regular(path, os.stat(path).st_mode)
        # It may be another file by now: what was opened is asked again, and of a pipe nothing is waited for.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        if isinstance(error, ReceivedError):
            raise
        raise ReceivedError(path, f"cannot be read: {_why(error)}") from error
    with open(handle, "rb") as file:
        _check_regular(path, os.fstat(handle).st_mode)
        yield file


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ReceivedError(path, "cannot be read: it is no regular file")


def _why(error: Exception) -> str:
    return why(error) if isinstance(error, OSError) else f"{error}."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice[:80]!r} stands twice in an object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond what a float holds")
    return value
