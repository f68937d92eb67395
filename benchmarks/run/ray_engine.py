"""The Ray engine: jobs on the nodes of a Ray cluster (extra `ray`). Use it for more than one machine.

A job is one Ray task, which holds its GPUs and starts the same worker as the local engine. Ray starts the task again on
another node if its node is lost. If the nodes share the runs folder, the worker writes into it. Otherwise the worker
trains in a folder of its node, and the finished run is sent back.
"""

import getpass
import io
import socket
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dipole.benchmarks.manifest import BENCH, is_done
from dipole.benchmarks.run.engine import Engine, EngineTask, TaskResult, environment_for, failed, run_worker
from dipole.core.utils.extras import needing
from dipole.core.utils.machine import processors

RETRIES = 5
Answer = tuple[TaskResult | None, bytes | None]
"""How a task ended on its node, and the run's files if the node does not share the runs folder."""


class RayEngine(Engine):
    """Jobs on the Ray cluster that RAY_ADDRESS names or that runs on this machine. Otherwise on a new local one.

    Args:
        jobs: jobs at a time over the whole cluster. Default: as many as its resources allow.
        threads: cores of a job. Default: all cores of a node divided by its GPUs, or 1 without GPUs.
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
        self.threads = threads or 1
        if self.gpus and not threads:
            self.threads = max(1, cores // self.gpus)
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
