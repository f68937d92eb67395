"""Jobs on this machine: a process for each job, or processes that run many jobs."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

from dipole.benchmarks.run.engine import Engine, EngineTask, TaskResult, environment_for, failed, run_here, run_worker
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.machine import processors


class LocalEngine(Engine):
    """A process per job: one at a time per GPU, or one per `threads` cores on a machine without GPUs.

    Args:
        jobs: processes at a time. Default: one per GPU, or one per core without GPUs.
        threads: computing threads of a process. Default: OMP_NUM_THREADS, or the cores divided among the processes.
        gpus: names for CUDA_VISIBLE_DEVICES. Default: those this process sees.
    """

    def __init__(self, jobs: int | None = None, threads: int | None = None, gpus: Sequence[str] | None = None) -> None:
        if gpus is None:
            gpus = visible_gpus()
        self.gpus = list(gpus)
        super().__init__(jobs or len(self.gpus) or processors())
        self.threads = threads or asked_threads() or max(1, processors() // self.slots)

    def prepare(self, tasks: Sequence[EngineTask], runs: Path) -> None:
        available = len(set(self.gpus))
        for task in tasks:
            if self.gpus and task.processes > available:
                raise ConfigError(
                    f"{task.label} needs {task.processes} GPUs, {available} are visible here. "
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

    Args:
        jobs: processes at a time. Default: one per core.
        threads: computing threads of a process. Default: OMP_NUM_THREADS, or one, as small runs gain nothing from more.
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
