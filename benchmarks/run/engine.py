"""The executor interface: a subclass of `Engine` makes one attempt at a task, `Engine.run` runs them all."""

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from dipole.benchmarks.run import worker
from dipole.benchmarks.run.job_lock import is_held
from dipole.benchmarks.run_records import BENCH, is_done
from dipole.core.record import now
from dipole.core.utils.files import check_own, why

RETRY_HELD_AFTER = 2.0
"""Seconds until a task is tried again that another runner holds."""
ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a worker to end. After any other signal it counts as killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class EngineTask:
    """A job as an engine sees it."""

    hash: str
    label: str
    command: list[str]
    processes: int = 1


@dataclass(frozen=True)
class TaskResult:
    """How a task ended, and how long this attempt took."""

    task: EngineTask
    status: Literal["done", "failed"]
    seconds: float
    log: Path
    message: str = ""
    killed: bool = False

    def on(self, task: EngineTask, runs: Path) -> "TaskResult":
        """Return the result with the log's path as this machine has it: a node may use another path."""
        return replace(self, task=task, log=log_of(task, runs))

    def as_dict(self) -> dict[str, str]:
        """Return a failure for `--json`."""
        return {"run": self.task.hash, "label": self.task.label, "message": self.message, "log": str(self.log)}


def failed(task: EngineTask, runs: Path, message: str, seconds: float = 0.0, killed: bool = False) -> TaskResult:
    """Return the result of a failed attempt."""
    return TaskResult(task, "failed", seconds, log_of(task, runs), message, killed)


class Engine(ABC):
    """Runs tasks, at most `slots` at a time."""

    shares_processes = False
    """Whether a process runs many tasks."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.stopped = threading.Event()

    @abstractmethod
    def attempt(self, task: EngineTask, runs: Path) -> TaskResult | None:
        """Run a task and wait for its end, in a thread of its own, or None if another runner holds the task."""

    @abstractmethod
    def prepare(self, tasks: Sequence[EngineTask], runs: Path) -> None:
        """Check the tasks before any of them starts."""

    @abstractmethod
    def stop(self) -> None:
        """End what still runs."""

    def run(self, tasks: Sequence[EngineTask], runs: Path) -> Iterator[TaskResult]:
        """Yield the result of every task once, in the order in which they end.

        A failed task does not stop the others. A task whose process was killed is attempted once more. A task that
        another runner holds is tried again later.
        """
        self.stopped.clear()
        self.prepare(tasks, runs)
        with ThreadPoolExecutor(self.slots) as pool:
            waiting: dict[Future[TaskResult | None], EngineTask] = {
                pool.submit(self._run, task, runs): task for task in tasks
            }
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

    def _run(self, task: EngineTask, runs: Path, pause: float = 0.0) -> TaskResult | None:
        if self.stopped.wait(pause):
            return None
        try:
            result = self.attempt(task, runs)
            if result is None or not result.killed or self.stopped.is_set():
                return result
            result = self.attempt(task, runs)
        except OSError as error:
            # A full disk or too many processes fail this task, not the suite.
            return failed(task, runs, f"the worker could not be started: {why(error)}")
        if result is not None and result.killed:
            result = replace(result, message=f"{result.message}. It was killed twice; was there enough memory?")
        return result


def run_worker(
    task: EngineTask,
    runs: Path,
    environment: Mapping[str, str],
    started: Callable[["subprocess.Popen[bytes]"], object] = lambda child: None,
) -> TaskResult | None:
    """Start a worker and wait for it. None, without a start or a line in the log, if another runner holds the task."""

    def run(log: IO[str]) -> int:
        words = worker.arguments(runs, task.hash, task.processes, os.getpid(), task.command)
        command = [sys.executable, "-m", worker.__name__, *words]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, env=environment, **pipes) as child:
            started(child)
            return child.wait()

    return _attempt(task, runs, run)


def run_here(task: EngineTask, runs: Path) -> TaskResult | None:
    """Run a task in this process. See `run_worker`."""

    def run(log: IO[str]) -> int:
        with redirect_stdout(log), redirect_stderr(log):
            return worker.main(worker.arguments(runs, task.hash, task.processes, os.getppid(), task.command))

    return _attempt(task, runs, run)


def environment_for(threads: int, gpus: str | None = None) -> dict[str, str]:
    """Return the environment of a worker: this process's own, with its number of threads and the GPUs it may use."""
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), "PYTHONUNBUFFERED": "1"}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


def log_of(task: EngineTask, runs: Path) -> Path:
    """Return the log of all attempts at a task."""
    return runs / BENCH / "logs" / f"{task.hash}.log"


def _attempt(task: EngineTask, runs: Path, run: Callable[[IO[str]], int]) -> TaskResult | None:
    """Run with the log of the task open, and judge the attempt by the run's record, not by the exit code alone."""
    with suppress(OSError):  # the worker reports what is wrong with the folder
        if is_held(runs / BENCH / "claims" / f"{task.hash}.json"):
            return None
    path = log_of(task, runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_own(path)
    started = time.monotonic()
    with path.open("a", encoding="utf-8") as log:
        began_at = log.tell()
        log.write(f"\n== {now()} dipole {' '.join(task.command)}\n")
        log.flush()
        code = run(log)
    seconds = time.monotonic() - started
    if code == worker.TAKEN:
        return None
    if code == 0 and is_done(runs / task.hash):
        return TaskResult(task, "done", seconds, path)
    return failed(task, runs, _reason(code, path, began_at), seconds, killed=code < 0 and -code not in ASKED_TO_END)


def _reason(code: int, log: Path, begin: int) -> str:
    """Return how the worker ended, with the error or last line of its part of the log. Another runner's may follow."""
    end = f"exit code {code}"
    if code < 0:
        end = f"killed by signal {-code}"
    attempt = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in attempt.splitlines() if line.strip() and not line.startswith("== ")]
    if not lines:
        return end
    error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
    return f"{end}: {error.removeprefix('error: ')}"
