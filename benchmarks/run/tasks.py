"""One attempt at a task: start a worker, or run the task in this process, and judge it by the record that it leaves."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from dipole.benchmarks.run import worker
from dipole.benchmarks.run.claim import is_held
from dipole.benchmarks.run_records import BENCH, is_done
from dipole.core.record import now
from dipole.core.utils.files import check_own

ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a worker to end. After any other signal it counts as killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Task:
    """A job as an engine sees it."""

    hash: str
    label: str
    command: list[str]
    processes: int = 1


@dataclass(frozen=True)
class Result:
    """How a task ended, and how long this attempt took."""

    task: Task
    status: Literal["done", "failed"]
    seconds: float
    log: Path
    message: str = ""
    killed: bool = False

    def on(self, task: Task, runs: Path) -> "Result":
        """Return the result with the log's path as this machine has it: a node may use another path."""
        return replace(self, task=task, log=log_of(task, runs))


class Children:
    """Running workers. After `stop` new ones are ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def wait(self, child: "subprocess.Popen[bytes]") -> int:
        """Wait for a worker and return its exit code."""
        with self._lock:
            self._running.add(child)
            if self._stopped:
                child.terminate()
        code = child.wait()
        with self._lock:
            self._running.discard(child)
        return code

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for child in self._running:
                child.terminate()


def run_worker(
    task: Task, runs: Path, environment: Mapping[str, str], children: Children | None = None
) -> Result | None:
    """Start a worker and wait for it. None, without a start or a line in the log, if another runner holds the task."""
    children = children or Children()

    def run(log: IO[str]) -> int:
        command = worker.command_line(runs, task.hash, task.processes, task.command)
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        return children.wait(child)

    return _attempt(task, runs, run)


def run_here(task: Task, runs: Path) -> Result | None:
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


def log_of(task: Task, runs: Path) -> Path:
    """Return the log of all attempts at a task."""
    return runs / BENCH / "logs" / f"{task.hash}.log"


def _attempt(task: Task, runs: Path, run: Callable[[IO[str]], int]) -> Result | None:
    """Run with the log of the task open, and judge the attempt by the run's record, not by the exit code alone."""
    if _is_held(task, runs):
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
        return Result(task, "done", seconds, path)
    killed = code < 0 and -code not in ASKED_TO_END
    return Result(task, "failed", seconds, path, _reason(code, path, began_at), killed)


def _is_held(task: Task, runs: Path) -> bool:
    try:
        return is_held(runs / BENCH / "claims" / f"{task.hash}.json")
    except OSError:
        return False  # the worker reports what is wrong with the folder


def _reason(code: int, log: Path, begin: int) -> str:
    """Return how the worker ended, and the error or the last line that its part of the log shows.

    Another runner may have begun its own attempt at the same job since, so ours need not be the last.
    """
    end = f"exit code {code}"
    if code < 0:
        end = f"killed by signal {-code}"
    attempt = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in attempt.splitlines() if line.strip() and not line.startswith("== ")]
    if not lines:
        return end
    error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
    return f"{end}: {error.removeprefix('error: ')}"
