"""The streams of a command as its shell made them: closed, full, without a reader, of an alphabet too small.

What a command has said is written when it ends, or it has failed: nothing is left to the interpreter, which would print
a traceback and exit with 120 where a disk is full or a reader has gone.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from dipole.core.utils.files import why

_OF_STREAMS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _Closed(io.TextIOWrapper):
    """Stands for a stdout that is closed: whether anything was lost is known at the end, when the work is done."""

    said = False

    def write(self, text: str) -> int:
        self.said = self.said or bool(text)
        return super().write(text)

    def flush(self) -> None:
        """Nothing is kept."""


def prepare() -> None:
    """Give a command three streams that it can use, whatever there was."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _take_places()
    # Python declares the three as always there.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _Closed(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _take_places() -> None:
    """Occupy the numbers of closed streams, which the next file to be opened would get, and a child write into."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def finish() -> None:
    """Write what is still held back.

    Raises:
        OSError: stdout does not take it, or was closed and something was said.
    """
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)
    sys.stdout.flush()
    if isinstance(sys.stdout, _Closed) and sys.stdout.said:
        raise OSError(errno.EBADF, "stdout is closed")


def silence(stream: TextIO) -> None:
    """Nothing more is written to a stream that takes nothing, not even at exit; what it holds would fail again."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str, stream: TextIO) -> None:
    """Print a line and flush it; where nobody can be told, that is no error on top of what is said."""
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        silence(stream)


def cannot_write(error: OSError) -> str:
    """What is said of an error of writing to a stream; "" for any other."""
    if error.filename is not None or error.errno not in _OF_STREAMS:
        return ""
    if error.errno == errno.EBADF:
        return "cannot write the output: stdout is closed. Send it to a terminal, a file or a pipe, or to /dev/null."
    return f"cannot write the output: {why(error)}"
