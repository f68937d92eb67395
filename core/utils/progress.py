"""Progress on stderr: a bar on a terminal, a line written over in a notebook, a plain one now and then elsewhere.

Nothing that is told here can fail: work does not end because nobody hears how far it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from dipole.core.utils.console import can_draw, console

PLAIN_SECONDS = 10.0
SHOWN_SECONDS = 0.25
ENOUGH = 3
"""Steps that are timed before any time left is said; the first is not among them: it builds, compiles and caches."""
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
    """Whatever shows progress within the block is quiet, however deep it is made."""
    token = _QUIET.set(quiet or _QUIET.get())
    try:
        yield
    finally:
        _QUIET.reset(token)


def in_notebook() -> bool:
    """Whether stderr is the output below a cell: of Jupyter, Colab and their kin, whose kernels are ipykernel's."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"


class Progress:
    """Shows how far a run is.

    Args:
        quiet: show nothing but warnings.
        mute: not even these, on ranks other than 0.
    """

    def __init__(self, quiet: bool = False, mute: bool = False) -> None:
        self._quiet = quiet or mute or _QUIET.get()
        self._mute = mute
        self._bar: object | None = None
        self._total = 0
        self._shown = 0.0
        self._text = ""
        self._unit = "step"
        self._timed_from: tuple[int, float] | None = None
        self._over = 0  # characters of a notebook's line that the next one is written over

    def start(self, title: str, total: int, step: int, unit: str = "step") -> None:
        """Begin to show a run.

        Args:
            title: its name, beside the bar.
            total: steps of the whole run.
            step: steps done before.
            unit: what a plain line counts.
        """
        self._total = total
        self._unit = unit
        self._timed_from = None
        self._shown = time.monotonic()
        if self._quiet or not can_draw(sys.stderr):
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console(stderr=True),
            refresh_per_second=4,
        )
        bar.start()
        self._task = bar.add_task(title, total=total, completed=step, text="")
        self._bar = bar

    def update(self, step: int) -> None:
        """Tell the step; cheap enough for every step.

        Args:
            step: steps done.
        """
        now = time.monotonic()
        if self._timed_from is None:
            self._timed_from = (step, now)
        notebook = self._bar is None and in_notebook()
        if self._quiet or now - self._shown < (SHOWN_SECONDS if self._bar is not None or notebook else PLAIN_SECONDS):
            return
        self._shown = now
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._text)  # type: ignore[attr-defined]
            return
        line = "  ".join(filter(None, [f"{self._unit} {step}/{self._total}", self._text, self._left(step, now)]))
        if notebook:
            self._write_over(line)
        else:
            _print(line)

    def _left(self, step: int, now: float) -> str:
        assert self._timed_from is not None
        first, began = self._timed_from
        if step - first < ENOUGH:
            return ""
        return f"about {duration((now - began) / (step - first) * (self._total - step))} left"

    def values(self, values: Mapping[str, float]) -> None:
        """Remember what stands beside the bar.

        Args:
            values: numbers by name.
        """
        self._text = "  ".join(f"{name.removeprefix('train/')} {value:.4g}" for name, value in values.items())

    def status(self, text: str) -> None:
        """Say on the bar, or on the line of a notebook, what takes a while.

        Args:
            text: a few words.
        """
        if self._bar is not None:
            self._bar.update(self._task, text=text)  # type: ignore[attr-defined]
        elif not self._quiet and in_notebook():
            self._write_over(text)

    def note(self, text: str) -> None:
        """Print one line above the bar.

        Args:
            text: the line.
        """
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print one line even when quiet.

        Args:
            text: the line.
        """
        if self._mute:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)  # type: ignore[attr-defined]
        else:
            self._leave_line()
            _print(text)

    def _write_over(self, line: str) -> None:
        """Show a line in place of the last one below a cell."""
        _print(f"\r{line:<{self._over}}", end="")
        self._over = len(line)

    def _leave_line(self) -> None:
        """What comes next begins below the line of a notebook."""
        if self._over:
            _print("")
            self._over = 0

    def close(self, step: int | None = None) -> None:
        """Leave the terminal as it was.

        Args:
            step: steps done at the end; None: as told last.
        """
        if self._bar is not None:
            if step is not None:
                self._bar.update(self._task, completed=step, text=self._text)  # type: ignore[attr-defined]
            self._bar.stop()  # type: ignore[attr-defined]
            self._bar = None
        self._leave_line()


def _print(text: str, end: str = "\n") -> None:
    if sys.stderr is not None:  # print() takes stdout for None
        with suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """42 -> '42s', 130 -> '2m10s', 7300 -> '2h01m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
