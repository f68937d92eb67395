"""Progress on stderr: a bar on a terminal, one updated line in a notebook, and occasional lines elsewhere.

Errors of stderr are ignored. `console` is rich's, as plain as its stream and the environment ask for.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Any

from dipole.core.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

PLAIN_SECONDS = 10.0
SHOWN_SECONDS = 0.25
NO_WIDTH = 10_000
ENOUGH = 3
"""Steps to time before the remaining time is shown. The first step is not timed, as it builds, compiles and caches."""
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


def can_draw(stream: IO[str] | None) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return _is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def console(stderr: bool = False) -> "Console":
    """Return a rich console. NO_COLOR switches off all styles, where rich alone would keep bold and italics.

    Pipes never count as terminals, also with FORCE_COLOR. Their lines are not wrapped, unless COLUMNS is set.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    no_style = bool(os.environ.get("NO_COLOR"))
    drawn = _is_terminal(stream)
    width = None if drawn or os.environ.get("COLUMNS") else NO_WIDTH
    return Console(stderr=stderr, force_terminal=drawn, color_system=None if no_style else "auto", width=width)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Silence all progress within the block."""
    token = _QUIET.set(quiet or _QUIET.get())
    try:
        yield
    finally:
        _QUIET.reset(token)


def in_notebook() -> bool:
    """Return whether stderr goes to a notebook cell (Jupyter, Colab: an ipykernel)."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


class Progress:
    """Shows how far a run is. `quiet` hides all but warnings, and `mute` also hides those (ranks other than 0)."""

    def __init__(self, quiet: bool = False, mute: bool = False) -> None:
        self._quiet = quiet or mute or _QUIET.get()
        self._mute = mute
        self._bar: Any = None
        self._total = 0
        self._shown = 0.0
        self._text = ""
        self._unit = "step"
        self._timed_from: tuple[int, float] | None = None
        self._over = 0  # length of the notebook's line that the next one overwrites

    def start(
        self, title: str, total: int, step: int, unit: str = "step", left: "ProgressColumn | None" = None
    ) -> None:
        """Begin to show a run of `total` steps, 0 if unknown. A plain line counts `unit`, a bar has `left`."""
        self._total = total
        self._unit = unit
        self._timed_from = None
        self._shown = time.monotonic()
        if self._quiet or not can_draw(sys.stderr):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = console(stderr=True)
        bar = Bar(*columns, left or TimeRemainingColumn(), "{task.fields[text]}", console=shown, refresh_per_second=4)
        bar.start()
        self._task = bar.add_task(printable(title), total=total or None, completed=step, text="")
        self._bar = bar

    def update(self, step: int) -> None:
        """Set the number of steps done. Cheap enough for every step."""
        now = time.monotonic()
        if self._timed_from is None:
            self._timed_from = (step, now)
        every = SHOWN_SECONDS if self._bar is not None or in_notebook() else PLAIN_SECONDS
        if self._quiet or now - self._shown < every:
            return
        self._shown = now
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._text)
            return
        count = f"{self._unit} {step}"
        if self._total:
            count += f"/{self._total}"
        self._write("  ".join(filter(None, [count, self._text, self._left(step, now)])))

    def _left(self, step: int, now: float) -> str:
        assert self._timed_from is not None
        first, began = self._timed_from
        if step - first < ENOUGH or not self._total:
            return ""
        return f"about {duration((now - began) / (step - first) * (self._total - step))} left"

    def values(self, values: Mapping[str, float]) -> None:
        """Set the numbers shown right of the bar."""
        self._text = "  ".join(f"{name.removeprefix('train/')} {value:.4g}" for name, value in values.items())

    def status(self, text: str) -> None:
        """Show a status text on the bar or on the notebook's line."""
        if self._bar is not None:
            self._bar.update(self._task, text=text)
        elif not self._quiet and in_notebook():
            self._write(text)

    def note(self, text: str, step: int | None = None) -> None:
        """Print one line above the bar, which shows `step` from now on if it is given."""
        if not self._quiet:
            self.warn(text)
            if self._bar is not None and step is not None:
                self._bar.update(self._task, completed=step, text=self._text)

    def warn(self, text: str) -> None:
        """Print one line even when quiet."""
        if self._mute:
            return
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        else:
            self._leave_line()
            _print(text)

    def _write(self, line: str) -> None:
        """Print a line, below a notebook cell over the last one."""
        if in_notebook():
            _print(f"\r{line:<{self._over}}", end="")
            self._over = len(line)
        else:
            _print(line)

    def _leave_line(self) -> None:
        """End the line that was being overwritten."""
        if self._over:
            _print("")
            self._over = 0

    def close(self, step: int | None = None) -> None:
        """Remove the bar. `step` is the number of steps done at the end, by default that of the last update."""
        if self._bar is not None:
            if step is not None:
                self._bar.update(self._task, completed=step, text=self._text)
            self._bar.stop()
            self._bar = None
        self._leave_line()


def _print(text: str, end: str = "\n") -> None:
    if sys.stderr is not None:  # print(file=None) would write to stdout
        with suppress(OSError, ValueError):
            print(printable(text, "\n\t\r"), end=end, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Format seconds: 42 -> '42s', 130 -> '2m10s', 7300 -> '2h01m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
