"""One task: a job started as a worker, or run in this process, and judged by the record that it leaves."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from dipole.benchmarks.run import worker
from dipole.benchmarks.run.claim import is_held
from dipole.benchmarks.run_records import BENCH, is_done
from dipole.core.record import now
from dipole.core.utils.files import check_own, why

ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a worker because somebody wants it to end; after any other one it was killed."""


@dataclass(frozen=True)
class Task:
    """What an engine needs to know of a job."""

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


def execute(
    task: Task, runs: Path, environment: Mapping[str, str], children: "Children | None" = None
) -> Result | Task:
    """Start a worker, wait for it, and judge it by the record it leaves, not by its exit code alone.

    A worker that was killed (kill -9, too little memory) is started once more, from the checkpoint that it left.
    The task itself comes back, and nothing is started or logged, while another runner's worker holds it.
    """
    children = children or Children()
    return once_more(lambda: _execute(task, runs, environment, children), lambda: children.stopped)


def once_more(attempt: Callable[[], Result | Task], stopped: Callable[[], bool]) -> Result | Task:
    """Attempt a task, and once more if its process was killed: not for ever, as what was killed may be what kills."""
    outcome = attempt()
    if not isinstance(outcome, Result) or not outcome.killed or stopped():
        return outcome
    again = attempt()
    if isinstance(again, Result) and again.killed:
        again = replace(again, message=f"{again.message}. It was killed twice; was there enough memory?")
    return again


def _execute(task: Task, runs: Path, environment: Mapping[str, str], children: "Children") -> Result | Task:
    if _is_taken(task, runs):
        return task
    with _attempt(task, runs) as (log, attempt):
        child = subprocess.Popen(
            worker.command_line(runs, task.hash, task.processes, task.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        children.add(child)
        code = child.wait()
        children.remove(child)
    return attempt.result(code)


def execute_here(task: Task, runs: Path) -> Result | Task:
    """As `execute`, in this process."""
    if _is_taken(task, runs):
        return task
    with _attempt(task, runs) as (log, attempt), redirect_stdout(log), redirect_stderr(log):
        code = worker.main(worker.arguments(runs, task.hash, task.processes, os.getppid(), task.command))
    return attempt.result(code)


def not_started(task: Task, runs: Path, error: OSError) -> Result:
    """A full disk or too many processes: this job's failure, not the suite's."""
    return Result(task, "failed", 0.0, log_of(task, runs), f"the worker could not be started: {why(error)}")


def log_of(task: Task, runs: Path) -> Path:
    """The log of all attempts at a task."""
    return runs / BENCH / "logs" / f"{task.hash}.log"


class Children:
    """Running workers; after `stop` new ones are ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def add(self, child: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            self._running.add(child)
            if self.stopped:
                child.terminate()

    def remove(self, child: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            self._running.discard(child)

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for child in self._running:
                child.terminate()


@dataclass(frozen=True)
class _Attempt:
    """One attempt at a task: where in its log it begins, and when it began."""

    task: Task
    runs: Path
    begin: int
    started: float

    def result(self, code: int) -> Result | Task:
        """What a worker that ended with this code has done; the task itself if another one has the job."""
        log, seconds = log_of(self.task, self.runs), time.monotonic() - self.started
        if code == worker.TAKEN:
            return self.task
        if code == 0 and is_done(self.runs / self.task.hash):
            return Result(self.task, "done", seconds, log)
        killed = code < 0 and -code not in ASKED_TO_END
        return Result(self.task, "failed", seconds, log, _reason(code, log, self.begin), killed)


@contextmanager
def _attempt(task: Task, runs: Path) -> Iterator[tuple[IO[str], _Attempt]]:
    """The log of a task, opened for one more attempt at it."""
    log = log_of(task, runs)
    log.parent.mkdir(parents=True, exist_ok=True)
    check_own(log)
    attempt = _Attempt(task, runs, log.stat().st_size if log.exists() else 0, time.monotonic())
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n== {now()} dipole {' '.join(task.command)}\n")
        output.flush()
        yield output, attempt


def _is_taken(task: Task, runs: Path) -> bool:
    try:
        return is_held(runs / BENCH / "claims" / f"{task.hash}.json")
    except OSError:
        # The claim's clock is a file as well; the worker that is started will say what is wrong.
        return False


def _reason(code: int, log: Path, begin: int) -> str:
    """How the worker ended, and what the log says from `begin` on: the error if it names one, else its last line.

    Another runner may have begun its own attempt at the same job since, so that ours need not be the last.
    """
    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    attempt = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in attempt.splitlines() if line.strip() and not line.startswith("== ")]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
    return f"{end}: {said.removeprefix('error: ')}" if said else end
