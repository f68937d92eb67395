"""Where jobs run on this machine: a process for each, or processes that run many. On a cluster: `ray_engine`."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from dipole.benchmarks.run.machine import Places, environment_for, visible_gpus
from dipole.benchmarks.run.tasks import Children, Result, Task, execute, execute_here, log_of, not_started, once_more
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.machine import processors

RETRY_TAKEN_AFTER = 2.0


class Engine(Protocol):
    """Runs tasks and yields each one's result once, in the order in which they end."""

    slots: int

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]: ...


class LocalEngine:
    """Processes on this machine: one per GPU where there are GPUs, else one per `threads` cores."""

    def __init__(self, jobs: int | None = None, threads: int | None = None, gpus: Sequence[str] | None = None) -> None:
        """Args:
        jobs: processes at a time; default one per GPU, or one per core without GPUs.
        threads: computing threads of a process; default the cores divided among the processes.
        gpus: names for CUDA_VISIBLE_DEVICES; default those this process sees.
        """
        self.gpus = list(visible_gpus() if gpus is None else gpus)
        self.slots = jobs or len(self.gpus) or processors()
        self.threads = threads or max(1, processors() // self.slots)

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """Start tasks in order, keep going past failures, come back to tasks that another runner holds."""
        if short := [task for task in tasks if self.gpus and task.processes > len(set(self.gpus))]:
            raise ConfigError(
                f"{short[0].label} needs {short[0].processes} GPUs, {len(set(self.gpus))} are visible here. "
                "Set `processes` of the suite's scale, or use --engine ray on a larger cluster."
            )
        places, children = Places(self.gpus, self.slots), Children()
        with ThreadPoolExecutor(self.slots) as pool:
            try:
                yield from _results(pool, tasks, runs, partial(self._one, places, children))
            finally:
                # Reached by Ctrl-C and by a caller that stops listening as well: all children end.
                children.stop()

    def _one(self, places: Places, children: Children, task: Task, runs: Path) -> Result | Task:
        with places.taken(task.processes if self.gpus else 1) as gpus:
            environment = environment_for(self.threads, ",".join(gpus) if self.gpus else None)
            return execute(task, runs, environment, children)


class PoolEngine:
    """Processes on this machine's cores that run many tasks each: where starting one takes longer than the run."""

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        """Args:
        jobs: processes at a time; default one per core.
        threads: computing threads of a process; default the cores divided among the processes.
        """
        self.slots = jobs or processors()
        self.threads = threads or max(1, processors() // self.slots)

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """As `LocalEngine.run`; a process that is killed is replaced, and takes no run with it but its own."""
        processes = [_Process(self.threads) for _ in range(self.slots)]
        free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in processes:
            free.put(process)
        stopped = threading.Event()

        def one(task: Task, runs: Path) -> Result | Task:
            process = free.get()
            try:
                return once_more(lambda: process.execute(task, runs), stopped.is_set)
            finally:
                free.put(process)

        with ThreadPoolExecutor(self.slots) as pool:
            try:
                yield from _results(pool, tasks, runs, one)
            finally:
                stopped.set()
                for process in processes:
                    process.end()


class _Process:
    """One process that runs a task at a time; started when it is first needed, and again after it was killed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor: ProcessPoolExecutor | None = None

    def execute(self, task: Task, runs: Path) -> Result | Task:
        began = time.monotonic()
        if self._executor is None:
            context = get_context("spawn")
            self._executor = ProcessPoolExecutor(1, context, initializer=_limit, initargs=(self._threads,))
        try:
            return self._executor.submit(execute_here, task, runs).result()
        except BrokenProcessPool:
            self.end()
            seconds = time.monotonic() - began
            return Result(task, "failed", seconds, log_of(task, runs), "its process was killed", killed=True)

    def end(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


Attempt = Callable[[Task, Path], Result | Task]


def _results(pool: Executor, tasks: Sequence[Task], runs: Path, attempt: Attempt) -> Iterator[Result]:
    """Run every task in a pool and yield results as they come; a task that comes back is tried again later."""
    waiting: dict[Future[Result | Task], Task] = {pool.submit(_try, attempt, task, runs): task for task in tasks}
    try:
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                task = waiting.pop(future)
                outcome = future.result()
                if isinstance(outcome, Result):
                    yield outcome
                else:
                    waiting[pool.submit(_try, attempt, task, runs, RETRY_TAKEN_AFTER)] = task
    finally:
        # Reached by Ctrl-C and by a caller that stops listening as well: nothing new starts.
        for future in waiting:
            future.cancel()


def _try(attempt: Attempt, task: Task, runs: Path, pause: float = 0.0) -> Result | Task:
    """Run one task to its end; the task itself if another runner holds it."""
    time.sleep(pause)
    try:
        return attempt(task, runs)
    except OSError as error:
        return not_started(task, runs, error)


def _limit(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
