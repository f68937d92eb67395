"""Standard streams, JSON answers and questions of a command.

Streams may be closed, full, without a reader, or of a small alphabet. `finish` writes everything before the command
ends. Otherwise the interpreter would print a traceback and exit with 120.
"""

import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any, TextIO

from dipole.core.utils.errors import ConfigError, DipoleError
from dipole.core.utils.files import why
from dipole.core.utils.text import fitted, printable, screen_width

_STREAM_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _ClosedStdout(io.TextIOWrapper):
    """Replace a closed stdout and remember whether anything was lost."""

    lost = False

    def write(self, text: str) -> int:
        self.lost = self.lost or bool(text)
        return super().write(text)

    def flush(self) -> None:
        """Do nothing: there is no file behind it."""


def prepare() -> None:
    """Replace missing standard streams, and escape characters that they cannot encode."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The next opened file must not get descriptor 0, 1 or 2, into which a child process would write.
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    # Type checkers take all three for present.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _ClosedStdout(open(os.devnull, "wb"), encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def finish() -> None:
    """Flush both output streams. Raise OSError if stdout cannot be written, or was closed and got something."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)
    sys.stdout.flush()
    if isinstance(sys.stdout, _ClosedStdout) and sys.stdout.lost:
        raise OSError(errno.EBADF, "stdout is closed")


def silence(stream: TextIO) -> None:
    """Redirect a broken stream to the null device, so that the interpreter's last flush cannot fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _shown(text: str, stream: TextIO) -> str:
    """Return the text with control characters as escapes, wrapped for a terminal or to COLUMNS."""
    text = printable(text)
    if os.environ.get("COLUMNS") or stream.isatty():
        text = fitted(text, screen_width())
    return text


def write(text: Any, stream: TextIO | None = None, wrap: bool = True) -> None:
    """Print text of received files with control characters as escapes. `wrap` breaks lines wider than the terminal."""
    text = _shown(str(text), stream or sys.stdout) if wrap else printable(str(text))
    print(text, file=stream, flush=True)  # before the next line of the other stream, also in a pipe


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings for the user as "warning: ...", without the line of the source that gives them."""
    usual = warnings.formatwarning

    def shown(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        if category is not UserWarning:
            return usual(message, category, *place, **line)
        return f"{_shown(f'warning: {message}', sys.stderr)}\n"

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


def say(text: str, stream: TextIO, wrap: bool = True) -> None:
    """Print a line as `write` does, but ignore a stream that cannot be written."""
    try:
        write(text, stream, wrap)
    except (OSError, ValueError):
        silence(stream)


def cannot_write(error: OSError) -> str:
    """Return the message for an error of writing to a stream, or "" for any other error."""
    if error.filename is not None or error.errno not in _STREAM_ERRORS:
        return ""
    if error.errno == errno.EBADF:
        return "cannot write the output: stdout is closed. Send it to a terminal, a file or a pipe, or to /dev/null."
    return f"cannot write the output: {why(error)}"


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether --json, or an abbreviation that argparse accepts, is among the arguments."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(len(each) > 2 and "--json".startswith(each) for each in options)


def print_json_error(kind: str, message: str, exit_code: int) -> None:
    """Print {"error": {"type", "message", "exit_code"}} on stdout."""
    say(json.dumps({"error": {"type": kind, "message": message, "exit_code": exit_code}}), sys.stdout, wrap=False)


def stdout_to_stderr(active: bool) -> AbstractContextManager[object]:
    """Send everything that the block prints to stderr if `active`. Commands do so with --json."""
    if active:
        return redirect_stdout(sys.stderr)
    return nullcontext()


def print_result(as_json: bool, facts: Any, text: object, indent: int | None = None) -> int:
    """Print the facts that a command found as JSON if `as_json`, else the text. Return the exit code 0."""
    if as_json:
        print(json.dumps(facts, indent=indent, default=str))
    else:
        write(text)
    return 0


@contextmanager
def json_answer(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a dict to fill, and print it as JSON at the end of the block if `as_json`."""
    answer: dict[str, Any] = {}
    with stdout_to_stderr(as_json):
        yield answer
    if as_json:
        print(json.dumps(answer))


class DeclinedError(DipoleError):
    """The user did not confirm. Nothing was done."""


def confirm(question: str, purpose: str, nothing: str) -> None:
    """Ask a yes/no question on stderr. Raise DeclinedError with the message `nothing` unless the answer is yes.

    Raise ConfigError if stdin is no terminal. `purpose` completes "Add --yes", such as "to remove them".
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"not interactive: add --yes {purpose}.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    if answer.strip().lower() not in ("y", "yes"):
        raise DeclinedError(f"{nothing}.")
