"""The executor interface: a subclass of `Engine` makes one attempt at a task, `Engine.run` runs them all."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, Literal

from dipole.benchmarks.manifest import BENCH, is_done
from dipole.benchmarks.run import worker
from dipole.benchmarks.run.worker import is_held
from dipole.core.record import now
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import check_own, why
from dipole.core.utils.machine import processors

HELD_PAUSE = 2.0  # seconds until a task is tried again that another runner holds
ASKED_TO_END = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a worker to end. After any other signal it counts as killed."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class EngineTask:
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
        return {"run": self.task.hash, "label": self.task.label, "message": self.message, "log": str(self.log)}


def failed(task: EngineTask, runs: Path, message: str, seconds: float = 0.0, killed: bool = False) -> TaskResult:
    return TaskResult(task, "failed", seconds, log_of(task, runs), message, killed)


class Engine(ABC):
    """Runs tasks, at most `slots` at a time."""

    shares_processes = False  # whether a process runs many tasks

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
        """Yield the result of every task once, in the order in which they end. Killed tasks are attempted once more."""
        self.stopped.clear()
        self.prepare(tasks, runs)
        with ThreadPoolExecutor(self.slots) as pool:
            waiting = {pool.submit(self._run, task, runs): task for task in tasks}
            try:
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        task, result = waiting.pop(future), future.result()
                        if result is None:
                            waiting[pool.submit(self._run, task, runs, HELD_PAUSE)] = task
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
    own = dict.fromkeys(THREAD_VARIABLES, str(threads)) | {"PYTHONUNBUFFERED": "1"}
    if gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpus
    return os.environ | own


def log_of(task: EngineTask, runs: Path) -> Path:
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
    end = f"exit code {code}" if code >= 0 else f"killed by signal {-code}"
    attempt = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in attempt.splitlines() if line.strip() and not line.startswith("== ")]
    if not lines:
        return end
    error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
    return f"{end}: {error.removeprefix('error: ')}"


class LocalEngine(Engine):
    """A process per job, by default one at a time per GPU, or per core on a machine without GPUs.

    `threads` of a process are by default OMP_NUM_THREADS, or the cores divided among the processes. `gpus` are names
    for CUDA_VISIBLE_DEVICES, by default those this process sees.
    """

    def __init__(self, jobs: int | None = None, threads: int | None = None, gpus: Sequence[str] | None = None) -> None:
        self.gpus = visible_gpus() if gpus is None else list(gpus)
        super().__init__(jobs or len(self.gpus) or processors())
        self.threads = threads or asked_threads() or max(1, processors() // self.slots)

    def prepare(self, tasks: Sequence[EngineTask], runs: Path) -> None:
        available = len(set(self.gpus))
        if large := [task for task in tasks if 0 < available < task.processes]:
            raise ConfigError(
                f"{large[0].label} needs {large[0].processes} GPUs, {available} are visible here. "
                "Set `processes` of the suite's scale, or use --engine ray on a larger cluster."
            )
        self._free = FreeGPUs(self.gpus, self.slots)
        self._children: set[subprocess.Popen[bytes]] = set()

    def attempt(self, task: EngineTask, runs: Path) -> TaskResult | None:
        if not self.gpus:
            return run_worker(task, runs, environment_for(self.threads), self._started)
        with self._free.take(task.processes) as gpus:
            return run_worker(task, runs, environment_for(self.threads, ",".join(gpus)), self._started)

    def _started(self, child: "subprocess.Popen[bytes]") -> None:
        self._children.add(child)
        if self.stopped.is_set():
            child.terminate()

    def stop(self) -> None:
        for child in list(self._children):
            child.terminate()


class PoolEngine(Engine):
    """Processes that run many jobs one after another. Starting a process takes longer than many small runs.

    There is one per core, with OMP_NUM_THREADS threads or one: small runs gain nothing from more.
    """

    shares_processes = True

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        super().__init__(jobs or processors())
        self.threads = threads or asked_threads() or 1

    def prepare(self, tasks: Sequence[EngineTask], runs: Path) -> None:
        self._free: queue.SimpleQueue[ProcessPoolExecutor | None] = queue.SimpleQueue()
        for _ in range(self.slots):
            self._free.put(None)

    def attempt(self, task: EngineTask, runs: Path) -> TaskResult | None:
        """Use a free process, and replace it if it is killed."""
        began = time.monotonic()
        # A pool of one process, so that a killed process takes no other run with it.
        process = self._free.get()
        try:
            if process is None:
                process = ProcessPoolExecutor(1, get_context("spawn"), _begin, (self.threads,))
            return process.submit(_run, task, runs).result()
        except BrokenProcessPool:
            assert process is not None
            process.shutdown()
            process = None
            return failed(task, runs, "its process was killed", time.monotonic() - began, killed=True)
        finally:
            self._free.put(process)

    def stop(self) -> None:
        for _ in range(self.slots):
            process = self._free.get()
            if process is not None:
                process.shutdown()
        self.prepare([], Path())


def visible_gpus() -> list[str]:
    """Return the GPUs this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [name.strip() for name in shown.split(",") if name.strip() and name.strip() != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU")]


class FreeGPUs:
    """GPUs, handed out several at a time or not at all, so that two jobs never wait for each other."""

    def __init__(self, gpus: Sequence[str], slots: int) -> None:
        # With more slots than GPUs, some GPUs are shared.
        self._free = [name for name, _ in zip(cycle(gpus), range(max(slots, len(gpus))), strict=False)]
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        """Wait for `count` different GPUs and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: len(set(self._free)) >= count)
            names = list(dict.fromkeys(self._free))[:count]
            for name in names:
                self._free.remove(name)
        try:
            yield names
        finally:
            with self._changed:
                self._free += names
                self._changed.notify_all()


def asked_threads() -> int | None:
    """Return the number that OMP_NUM_THREADS names, or None."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) or None if text.isdecimal() else None


def _begin(threads: int) -> None:
    """Prepare a process of a pool. Ctrl-C ends it without a traceback while it imports torch or waits for a run."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    import torch

    torch.set_num_threads(threads)


def _run(task: EngineTask, runs: Path) -> TaskResult | None:
    """Run a task in a process of a pool. The trainer answers Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    result = run_here(task, runs)
    signal.signal(signal.SIGINT, before)
    return result
