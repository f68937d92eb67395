"""Read untrusted files so that they cannot hang the process, fill the memory or be ambiguous.

Only regular files are opened. Sizes, lines and nesting are limited. JSON follows RFC 8259: names are unique in an
object, and NaN, Infinity and lone surrogates are refused.
"""

import codecs
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
"""Largest file that is read at once, in bytes."""
LARGEST_TOML = 2**18
LONGEST_LINE = 2**20
DEEPEST = 64
_STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_DOTTED = re.compile(r"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*){64}""")
"""A key with this many dots, each of which nests a table."""


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raise ReceivedError with its path first."""
    with _opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ReceivedError(path, f"is damaged: it has more than {most} bytes")
    return content


def read_end(path: Path, count: int) -> bytes:
    """Return the last bytes of a regular file of any size. Raise ReceivedError as in `read_bytes`."""
    with _opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - count))
        return file.read(count)


def read_text(path: Path, most: int = LARGEST) -> str:
    """Return the content of a regular UTF-8 file. Raise ReceivedError as in `read_bytes`."""
    content = read_bytes(path, most)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ReceivedError(path, "is UTF-16, as `>` of PowerShell writes it: save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReceivedError(path, f"is damaged: not UTF-8 ({error.reason} at byte {error.start})") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raise ReceivedError if it is damaged."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ReceivedError(path, f"is damaged: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise ReceivedError if it is damaged."""
    text = read_text(path, LARGEST_TOML)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ReceivedError(path, f"is not valid TOML: {error}") from error


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines, of at most `LONGEST_LINE` bytes, of a regular file. Raise ReceivedError."""
    with _opened(path) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise ReceivedError(path, f"is damaged: a line has more than {LONGEST_LINE} bytes")
            yield line


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is not JSON, ambiguous or nested too deeply."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    check_depth(text)
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is no text") from None
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raise ValueError if it is not TOML or nests too deeply."""
    if _DOTTED.search(text):
        raise ValueError(f"nested deeper than {DEEPEST}")
    check_depth(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST}") from None


def check_depth(text: str) -> None:
    """Raise ValueError for brackets nested deeper than `DEEPEST`, before anything is parsed."""
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
    """Open a regular file for reading, without waiting for a pipe or touching a device."""
    try:
        _check_regular(path, os.stat(path).st_mode)
        # The path may have changed meanwhile, so check the opened file again, and do not block on a pipe.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            _check_regular(path, os.fstat(file.fileno()).st_mode)
            yield file
    except OSError as error:
        raise ReceivedError(path, f"cannot be read: {why(error)}") from error
    except (MemoryError, ValueError) as error:
        if isinstance(error, ReceivedError):
            raise
        raise ReceivedError(path, f"cannot be read: {error}.") from error


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ReceivedError(path, "cannot be read: it is no regular file")


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
