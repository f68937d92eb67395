"""Engines for more than one machine: nodes of a Ray cluster (extra `ray`), and SLURM through submitit (extra `slurm`).

A job is one Ray task, which holds its GPUs and starts the same worker as the local engine. Ray starts the task again on
another node if its node is lost. If the nodes share the runs folder, the worker writes into it. Otherwise the worker
trains in a folder of its node, and the finished run is sent back.

With SLURM a job is one of an array, and all nodes have to share the runs folder. submitit submits a job again that
meets its time limit or is pre-empted. The run then continues from its checkpoint.
"""

import getpass
import io
import socket
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dipole.benchmarks.manifest import BENCH, is_done
from dipole.benchmarks.run.engine import HELD_PAUSE, Engine, EngineTask, TaskResult, environment_for, failed, run_worker
from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.extras import needing
from dipole.core.utils.machine import processors

RETRIES = 5
SLOTS, THREADS, MINUTES = 16, 4, 24 * 60
Answer = tuple[TaskResult | None, bytes | None]
"""How a task ended on its node, and the run's files if the node does not share the runs folder."""


class RayEngine(Engine):
    """Jobs on the Ray cluster that RAY_ADDRESS names or that runs on this machine. Otherwise on a new local one.

    `threads` are the cores of a job, by default all of a node divided by its GPUs, or 1 without GPUs.
    """

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        with needing("ray", "--engine ray"):
            import ray
        self.ray: Any = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, configure_logging=False)
        total = ray.cluster_resources()
        self.gpus = int(total.get("GPU", 0))
        cores = int(total.get("CPU", processors()))
        by_default = max(1, cores // self.gpus) if self.gpus else 1
        self.threads = threads or by_default
        super().__init__(jobs or max(1, self.gpus or cores // self.threads))
        self.on_node: Callable[[EngineTask, str, str, int], Answer] = on_node

    def prepare(self, tasks: Sequence[EngineTask], runs: Path) -> None:
        self._token = uuid.uuid4().hex
        self._lock, self._pending = threading.Lock(), set[Any]()
        _sign(runs, self._token).parent.mkdir(parents=True, exist_ok=True)
        _sign(runs, self._token).touch()
        self._runs = runs

    def attempt(self, task: EngineTask, runs: Path) -> TaskResult | None:
        remote = self.ray.remote(max_retries=RETRIES)(self.on_node)
        remote = remote.options(num_cpus=self.threads, num_gpus=task.processes if self.gpus else 0)
        with self._lock:
            reference = remote.remote(task, str(runs.resolve()), self._token, self.threads)
            self._pending.add(reference)
        try:
            result, archive = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return failed(task, runs, f"Ray gave up after {RETRIES} retries: {lines[0]}")
        finally:
            with self._lock:
                self._pending.discard(reference)
        if result is None:
            return None
        result = result.on(task, runs)
        if archive is not None:
            unpack(archive, runs, task.hash)
            if result.status == "done" and not is_done(runs / task.hash):
                return failed(task, runs, "files of the run are missing after transfer", result.seconds)
        return result

    def stop(self) -> None:
        with self._lock:
            for reference in self._pending:
                self.ray.cancel(reference, force=True)
        _sign(self._runs, self._token).unlink(missing_ok=True)


def _sign(runs: Path, token: str) -> Path:
    """A file by which a node sees that it shares the runs folder."""
    return runs / BENCH / f"shared-{token}"


def on_node(task: EngineTask, runs: str, token: str, threads: int) -> Answer:
    folder, is_shared = Path(runs), _sign(Path(runs), token).exists()
    if not is_shared:
        folder = Path(tempfile.gettempdir(), f"dipole-{getpass.getuser()}-{socket.gethostname()}")
        folder.mkdir(parents=True, exist_ok=True)
    # Ray has set CUDA_VISIBLE_DEVICES of this process to the GPUs of the task.
    result = run_worker(task, folder, environment_for(threads))
    if is_shared or result is None:
        return result, None
    return result, pack(folder, task.hash)


def pack(runs: Path, name: str) -> bytes:
    """Return a run and its log as one archive, without checkpoints."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in (Path(name), Path(BENCH, "logs", f"{name}.log")):
            if (runs / path).exists():
                archive.add(
                    runs / path,
                    arcname=str(path),
                    filter=lambda entry: None if Path(entry.name).parts[1:2] == ("checkpoints",) else entry,
                )
    return buffer.getvalue()


def unpack(archive: bytes, runs: Path, name: str) -> None:
    """Move a packed run and its log into the runs folder, in place of an earlier attempt."""
    target = runs / name
    with tempfile.TemporaryDirectory(dir=runs / BENCH) as draft:
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(draft, filter="data")
        log = Path(draft, BENCH, "logs", f"{name}.log")
        if log.exists():
            (runs / BENCH / "logs").mkdir(parents=True, exist_ok=True)
            log.replace(runs / BENCH / "logs" / log.name)
        if Path(draft, name).exists():
            with suppress(FileNotFoundError):
                target.replace(Path(draft, "earlier-attempt"))
            Path(draft, name).replace(target)


class SlurmEngine(Engine):
    """Tasks as the jobs of a SLURM array, one node each.

    `options` of sbatch have submitit's names: partition, account, qos, time (minutes), gpus_per_node, mem, ... The
    `cluster` "local" is processes on this machine.
    """

    def __init__(
        self,
        jobs: int | None = None,
        threads: int | None = None,
        options: Mapping[str, str] | None = None,
        cluster: str = "slurm",
    ) -> None:
        with needing("slurm", "--engine slurm"):
            import submitit
            from submitit.slurm.slurm import SlurmExecutor
        if cluster == "slurm" and SlurmExecutor.affinity() < 0:
            raise ConfigError(
                "--engine slurm: there is no sbatch on this machine. Start it on a login node of the cluster, or use "
                "--engine local."
            )
        known = sorted(SlurmExecutor._valid_parameters())
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"--slurm {name}: no such option.{nearest(name, known)} Allowed: {', '.join(known)}.")
        super().__init__(jobs or SLOTS)
        self.submitit: Any = submitit
        self.cluster, self.options, self.threads = cluster, dict(options or {}), threads or THREADS

    def prepare(self, tasks: Sequence[EngineTask], runs: Path) -> None:
        """Submit all tasks as one array."""
        self._jobs: dict[str, Any] = {}
        self._executor = self.submitit.AutoExecutor(folder=runs.resolve() / BENCH / "slurm", cluster=self.cluster)
        self._executor.update_parameters(timeout_min=MINUTES, cpus_per_task=self.threads, name="dipole")
        if self.cluster == "slurm":
            given: dict[str, Any] = {"array_parallelism": self.slots}
            if (processes := max((task.processes for task in tasks), default=1)) > 1:
                given["gpus_per_node"] = processes
            given |= self.options | {name: int(value) for name, value in self.options.items() if value.isdecimal()}
            self._executor.update_parameters(**{f"slurm_{name}": value for name, value in given.items()})
        with self._executor.batch():
            for task in tasks:
                self._jobs[task.hash] = self._submit(task, runs)

    def attempt(self, task: EngineTask, runs: Path) -> TaskResult | None:
        job = self._jobs[task.hash]
        if job is None:
            job = self._jobs[task.hash] = self._submit(task, runs)
        error = job.exception()
        self._jobs[task.hash] = None
        if error is None:
            result: TaskResult = job.result()
            return result.on(task, runs)
        from submitit.core.utils import FailedJobError, UncompletedJobError

        # Without an answer it was killed, for its memory or with its node.
        is_lost = isinstance(error, UncompletedJobError) and not isinstance(error, FailedJobError)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return failed(task, runs, f"job {job.job_id}: {lines[-1]}", killed=is_lost)

    def stop(self) -> None:
        for job in self._jobs.values():
            if job is not None:
                job.cancel()

    def _submit(self, task: EngineTask, runs: Path) -> Any:
        return self._executor.submit(OnNode(self.threads), task, str(runs.resolve()))


class OnNode:
    """Run a worker on this node. submitit calls `checkpoint` if the time of the job runs out."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __call__(self, task: EngineTask, runs: str) -> TaskResult:
        # A task that another runner holds is waited for here: a further job would wait in the cluster's queue.
        while (result := run_worker(task, Path(runs), environment_for(self.threads))) is None:
            time.sleep(HELD_PAUSE)
        return result

    def checkpoint(self, task: EngineTask, runs: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task, runs)
