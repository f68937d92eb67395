"""What a command answers with --json: one JSON value on stdout, and nothing else there; an error is one as well."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from dipole.core.cli.streams import say


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the arguments of a command, or a beginning of it, which argparse takes for it."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(len(each) > 2 and "--json".startswith(each) for each in options)


def failed(kind: str, message: str, exit_code: int) -> None:
    """Print an error as the one object of stdout: {"error": {"type", "message", "exit_code"}}."""
    say(json.dumps({"error": {"type": kind, "message": message, "exit_code": exit_code}}), sys.stdout)


@contextmanager
def aside(is_aside: bool) -> Iterator[None]:
    """Where it is (with --json), all that is printed inside the block goes to stderr: stdout is the answer's alone."""
    if not is_aside:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def answering(as_json: bool) -> Iterator[dict[str, Any]]:
    """Print what is filled inside the block, in which all else that is printed goes to stderr; without it, nothing."""
    answer: dict[str, Any] = {}
    with aside(as_json):
        yield answer
    if as_json:
        print(json.dumps(answer))
