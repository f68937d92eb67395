"""SIGINT and SIGTERM during a run."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from dipole.core.ground.errors import TrainingError


class RunInterruptedError(TrainingError):
    """A signal ended the run after a complete step; the checkpoint is saved."""


class Interrupts:
    """The first SIGINT or SIGTERM asks for an end after the step; the second ends at once."""

    def __init__(self, enabled: bool) -> None:
        self.requested = False
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if self._enabled:
            for which in (signal.SIGINT, signal.SIGTERM):
                self._before[which] = signal.signal(which, self._handle)

    def __exit__(self, *_: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)
        self._before = {}

    def _handle(self, which: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
