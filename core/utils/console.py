"""Where something can be drawn, and rich's console for it: as plain as its stream and the environment want it."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


NO_WIDTH = 10_000
"""Characters of a line that is written to no terminal."""


def can_draw(stream: IO[str] | None) -> bool:
    """Whether a stream is a terminal that can move its cursor: no pipe, no file, no dumb one, nothing closed."""
    return _is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def console(stderr: bool = False) -> Console:
    """rich's console of stdout or stderr: of a terminal only where there is one, without any style by NO_COLOR.

    rich itself takes a pipe for a terminal where FORCE_COLOR is set, and keeps bold and italics where NO_COLOR is. What
    goes into a pipe or a file has no width, unless COLUMNS says one: nothing is broken into lines there, or cut.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    no_style = bool(os.environ.get("NO_COLOR"))
    drawn = _is_terminal(stream)
    width = None if drawn or os.environ.get("COLUMNS") else NO_WIDTH
    return Console(stderr=stderr, force_terminal=drawn, color_system=None if no_style else "auto", width=width)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
