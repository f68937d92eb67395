"""The executor interface: a subclass of `Engine` makes one attempt at a task, `Engine.run` runs them all."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from dipole.benchmarks.run.tasks import Result, Task, log_of
from dipole.core.utils.files import why

RETRY_HELD_AFTER = 2.0
"""Seconds until a task is tried again that another runner holds."""


class Engine(ABC):
    """Runs tasks, at most `slots` at a time.

    Args:
        slots: attempts at a time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.stopped = threading.Event()

    @abstractmethod
    def attempt(self, task: Task, runs: Path) -> Result | None:
        """Run a task and wait for its end, in a thread of its own, or None if another runner holds the task."""

    @abstractmethod
    def prepare(self, tasks: Sequence[Task], runs: Path) -> None:
        """Check the tasks before any of them starts."""

    @abstractmethod
    def stop(self) -> None:
        """End what still runs."""

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """Yield the result of every task once, in the order in which they end.

        A failed task does not stop the others. A task whose process was killed is attempted once more. A task that
        another runner holds is tried again later.
        """
        self.stopped.clear()
        self.prepare(tasks, runs)
        with ThreadPoolExecutor(self.slots) as pool:
            waiting: dict[Future[Result | None], Task] = {pool.submit(self._run, task, runs): task for task in tasks}
            try:
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        task, result = waiting.pop(future), future.result()
                        if result is None:
                            waiting[pool.submit(self._run, task, runs, RETRY_HELD_AFTER)] = task
                        else:
                            yield result
            finally:
                # Also after Ctrl-C, and if the caller stops listening.
                self.stopped.set()
                for future in waiting:
                    future.cancel()
                self.stop()

    def _run(self, task: Task, runs: Path, pause: float = 0.0) -> Result | None:
        if self.stopped.wait(pause):
            return None
        try:
            result = self.attempt(task, runs)
            if result is None or not result.killed or self.stopped.is_set():
                return result
            result = self.attempt(task, runs)
        except OSError as error:
            # A full disk or too many processes fail this task, not the suite.
            message = f"the worker could not be started: {why(error)}"
            return Result(task, "failed", 0.0, log_of(task, runs), message)
        if result is not None and result.killed:
            result = replace(result, message=f"{result.message}. It was killed twice; was there enough memory?")
        return result
