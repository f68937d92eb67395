"""rich's console, as plain as its stream and the environment ask for."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


NO_WIDTH = 10_000


def can_draw(stream: IO[str] | None) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return _is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def console(stderr: bool = False) -> Console:
    """Return a rich console for stdout or stderr.

    NO_COLOR switches off all styles, where rich alone would keep bold and italics. Pipes never count as terminals, also
    with FORCE_COLOR. Lines that go to a pipe or a file are not wrapped, unless COLUMNS is set.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    no_style = bool(os.environ.get("NO_COLOR"))
    drawn = _is_terminal(stream)
    width = None if drawn or os.environ.get("COLUMNS") else NO_WIDTH
    return Console(stderr=stderr, force_terminal=drawn, color_system=None if no_style else "auto", width=width)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
