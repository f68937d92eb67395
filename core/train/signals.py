"""Signals during a run: SIGINT of a user, SIGTERM and SIGUSR1 of a scheduler."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dipole.core.utils.distributed import Ballot
from dipole.core.utils.errors import TrainingError

REQUEUE = 75
"""Exit code of a run that a scheduler interrupted: EX_TEMPFAIL of sysexits.h, "try again later"."""
# Windows has no SIGUSR1.
HANDLED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class RunInterruptedError(TrainingError):
    """A signal ended the run after a complete step. The checkpoint is saved.

    Args:
        message: what was saved, and how to go on.
        signum: the signal. `exit_code` is `REQUEUE` for all but SIGINT.
    """

    def __init__(self, message: str, signum: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 1 if signum == signal.SIGINT else REQUEUE


class Interrupted(KeyboardInterrupt):
    """A signal arrived outside a step, so nothing has to be finished first."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Interrupts:
    """Handle signals while open: raise `Interrupted`, or within `finishing` remember the signal until the step ends.

    A second SIGINT always raises. Other repeated signals are ignored, because launchers repeat what the scheduler has
    already sent to every process.
    """

    def __init__(self) -> None:
        self.received = 0
        self._finishing = False
        self.ballot = Ballot()  # by which all ranks end at the same step
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for which in HANDLED:
                self._before[which] = signal.signal(which, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before = {}
        if isinstance(error, Interrupted):
            message = "interrupted before the first step. Repeat the command to continue."
            raise RunInterruptedError(message, error.signum) from None

    @contextmanager
    def finishing(self, steps: bool) -> Iterator[None]:
        """Remember a signal until the step ends. Without `steps`, raise `Interrupted`, also for an earlier one."""
        if self.received and not steps:
            raise Interrupted(self.received)
        before, self._finishing = self._finishing, steps
        try:
            yield
        finally:
            self._finishing = before

    def _handle(self, which: int, frame: FrameType | None) -> None:
        again, self.received = bool(self.received), self.received or which
        if not self._finishing or (again and which == signal.SIGINT):
            raise Interrupted(which)
