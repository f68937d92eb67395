"""Where jobs run: local processes, as many as cores and GPUs allow. The Ray engine is `dipole.benchmarks.cluster`."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, Protocol

from dipole.benchmarks import worker
from dipole.benchmarks.collect import is_done
from dipole.benchmarks.lease import is_held
from dipole.benchmarks.worker import BENCH, TAKEN, command_line
from dipole.core.ground.errors import ConfigError
from dipole.core.ground.files import why
from dipole.core.record import now

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
RETRY_TAKEN_AFTER = 2.0


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
        self.slots = jobs or len(self.gpus) or cores()
        self.threads = threads or max(1, cores() // self.slots)

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """Start tasks in order, keep going past failures, come back to tasks that another runner holds."""
        if short := [task for task in tasks if self.gpus and task.processes > len(set(self.gpus))]:
            raise ConfigError(
                f"{short[0].label} needs {short[0].processes} GPUs, {len(set(self.gpus))} are visible here. "
                "Set `processes` of the suite's scale, or use --engine ray on a larger cluster."
            )
        places, children = _Places(self.gpus, self.slots), _Children()
        with ThreadPoolExecutor(self.slots) as pool:
            waiting: set[Future[Result | Task]] = {
                pool.submit(self._one, task, runs, places, children) for task in tasks
            }
            try:
                while waiting:
                    ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in ended:
                        outcome = future.result()
                        if isinstance(outcome, Result):
                            yield outcome
                        else:
                            waiting.add(pool.submit(self._later, outcome, runs, places, children))
            finally:
                # Reached by Ctrl-C and by a caller that stops listening as well: nothing new starts, all children end.
                for future in waiting:
                    future.cancel()
                children.stop()

    def _later(self, task: Task, runs: Path, places: "_Places", children: "_Children") -> Result | Task:
        time.sleep(RETRY_TAKEN_AFTER)
        return self._one(task, runs, places, children)

    def _one(self, task: Task, runs: Path, places: "_Places", children: "_Children") -> Result | Task:
        """Run one task to its end; the task itself if another runner holds it."""
        with places.taken(task.processes if self.gpus else 1) as gpus:
            environment = environment_for(self.threads, ",".join(gpus) if self.gpus else None)
            try:
                return execute(task, runs, environment, children)
            except OSError as error:
                return _not_started(task, runs, error)


class PoolEngine:
    """Processes on this machine's cores that run many tasks each: where starting one takes longer than the run."""

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        """Args:
        jobs: processes at a time; default one per core.
        threads: computing threads of a process; default the cores divided among the processes.
        """
        self.slots = jobs or cores()
        self.threads = threads or max(1, cores() // self.slots)

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """As `LocalEngine.run`; if a process is killed, the tasks that are left have failed."""
        context = get_context("spawn")
        with ProcessPoolExecutor(self.slots, context, initializer=_limit, initargs=(self.threads,)) as pool:
            waiting: dict[Future[Result | Task], Task] = {pool.submit(_in_turn, task, runs): task for task in tasks}
            try:
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        task = waiting.pop(future)
                        try:
                            outcome = future.result()
                        except BrokenProcessPool:
                            outcome = Result(task, "failed", 0.0, log_of(task, runs), "its process was killed")
                        if isinstance(outcome, Result):
                            yield outcome
                        else:
                            waiting[pool.submit(_in_turn, task, runs, RETRY_TAKEN_AFTER)] = task
            finally:
                pool.shutdown(cancel_futures=True)


def _limit(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _in_turn(task: Task, runs: Path, pause: float = 0.0) -> Result | Task:
    """Run one task in this process as a worker would."""
    time.sleep(pause)
    if _is_taken(task, runs):
        return task
    try:
        return _here(task, runs)
    except OSError as error:
        return _not_started(task, runs, error)


def _here(task: Task, runs: Path) -> Result | Task:
    log = log_of(task, runs)
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    begin = _size(log)
    with log.open("a", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        print(f"\n== {now()} dipole {' '.join(task.command)}", flush=True)
        code = worker.main(worker.arguments(runs, task.hash, task.processes, os.getppid(), task.command))
    return _judged(task, code, time.monotonic() - started, runs, begin)


def execute(task: Task, runs: Path, environment: dict[str, str], children: "_Children | None" = None) -> Result | Task:
    """Start a worker, wait for it, and judge it by the record it leaves, not by its exit code alone.

    The task itself comes back, and nothing is started or logged, while another runner's worker holds it.
    """
    if _is_taken(task, runs):
        return task
    log = log_of(task, runs)
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    begin = _size(log)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"\n== {now()} dipole {' '.join(task.command)}\n")
        output.flush()
        child = subprocess.Popen(
            command_line(runs, task.hash, task.processes, task.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        if children is not None:
            children.add(child)
        code = child.wait()
        if children is not None:
            children.remove(child)
    return _judged(task, code, time.monotonic() - started, runs, begin)


def _judged(task: Task, code: int, seconds: float, runs: Path, begin: int) -> Result | Task:
    log = log_of(task, runs)
    if code == TAKEN:
        return task
    if code == 0 and is_done(runs / task.hash):
        return Result(task, "done", seconds, log)
    return Result(task, "failed", seconds, log, _reason(code, log, begin))


def _not_started(task: Task, runs: Path, error: OSError) -> Result:
    """A full disk or too many processes: this job's failure, not the suite's."""
    return Result(task, "failed", 0.0, log_of(task, runs), f"the worker could not be started: {why(error)}")


def _is_taken(task: Task, runs: Path) -> bool:
    try:
        return is_held(runs / BENCH / "claims" / f"{task.hash}.json")
    except OSError:
        # The claim's clock is a file as well; the worker that is started will say what is wrong.
        return False


def log_of(task: Task, runs: Path) -> Path:
    """The log of all attempts at a task."""
    return runs / BENCH / "logs" / f"{task.hash}.log"


def environment_for(threads: int, gpus: str | None) -> dict[str, str]:
    """The environment of a worker: this process's own, with the number of threads and the GPUs it may use."""
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), "PYTHONUNBUFFERED": "1"}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """GPUs this process may use, by the names CUDA_VISIBLE_DEVICES takes."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [name.strip() for name in shown.split(",") if name.strip() and name.strip() != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU")]


class _Places:
    """GPUs (or plain places without GPUs), handed out several at a time or not at all, so that nothing deadlocks."""

    def __init__(self, gpus: Sequence[str], slots: int) -> None:
        self._free = [gpus[i % len(gpus)] for i in range(max(slots, len(gpus)))] if gpus else [""] * slots
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[str]]:
        """Wait for `count` different places and hold them."""
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


class _Children:
    """Running workers; after `stop` new ones are ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def add(self, child: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            self._running.add(child)
            if self._stopped:
                child.terminate()

    def remove(self, child: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            self._running.discard(child)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for child in self._running:
                child.terminate()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(code: int, log: Path, begin: int) -> str:
    """How the worker ended, and what the log says from `begin` on: the error if it names one, else its last line.

    Another runner may have begun its own attempt at the same job since, so that ours need not be the last.
    """
    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    attempt = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in attempt.splitlines() if line.strip() and not line.startswith("== ")]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
    return f"{end}: {said.removeprefix('error: ')}" if said else end
