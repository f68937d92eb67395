"""The Ray engine: the same workers on the nodes of a Ray cluster (extra `ray`).

Every job is one Ray task that holds its GPUs and starts the worker of the local engine, so results are the same. A task
whose node is lost is started again on another one. Where the runs folder is shared by the nodes the worker writes into
it; elsewhere the run is trained in a folder of the node and sent back whole.
"""

import getpass
import io
import socket
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dipole.benchmarks.run.engines import RETRY_TAKEN_AFTER
from dipole.benchmarks.run.machine import environment_for
from dipole.benchmarks.run.tasks import Result, Task, execute, log_of
from dipole.benchmarks.run_records import BENCH, is_done
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line
from dipole.core.utils.machine import processors

RETRIES = 5


class RayEngine:
    """Tasks on a Ray cluster: the one named by RAY_ADDRESS or running on this machine, else a new local one."""

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        """Args:
        jobs: tasks at a time over the whole cluster; default as many as its resources allow.
        threads: cores of a task; default all cores of a node divided by its GPUs, or 1 without GPUs.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError(f"--engine ray needs Ray. Install it with: {install_line('ray')}") from error
        self.ray: Any = ray
        if not self.ray.is_initialized():
            self.ray.init(log_to_driver=False, configure_logging=False)
        total = self.ray.cluster_resources()
        self.gpus = int(total.get("GPU", 0))
        available = int(total.get("CPU", processors()))
        self.threads = threads or (max(1, available // self.gpus) if self.gpus else 1)
        self.slots = jobs or max(1, self.gpus or available // self.threads)

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """Submit tasks as the cluster has room and yield results as they come."""
        token = uuid.uuid4().hex
        sign = runs / BENCH / f"shared-{token}"
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()
        remote = self.ray.remote(max_retries=RETRIES)(_on_node)
        pending: dict[Any, Task] = {}
        queue = list(reversed(tasks))
        try:
            while queue or pending:
                while queue and len(pending) < self.slots:
                    task = queue.pop()
                    gpus = task.processes if self.gpus else 0
                    options = remote.options(num_cpus=self.threads, num_gpus=gpus)
                    pending[options.remote(task, str(runs.resolve()), token, self.threads)] = task
                for reference in self.ray.wait(list(pending), num_returns=1)[0]:
                    yield self._result(pending.pop(reference), reference, runs)
        finally:
            for reference in pending:
                self.ray.cancel(reference, force=True)
            sign.unlink(missing_ok=True)

    def _result(self, task: Task, reference: Any, runs: Path) -> Result:
        log = log_of(task, runs)
        try:
            status, seconds, message, archive = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return Result(task, "failed", 0.0, log, f"Ray gave up after {RETRIES} retries: {lines[0]}")
        if archive is not None:
            unpack(archive, runs, task.hash)
            if status == "done" and not is_done(runs / task.hash):
                return Result(task, "failed", seconds, log, "the run did not arrive whole")
        return Result(task, status, seconds, log, message)


def _on_node(task: Task, runs: str, token: str, threads: int) -> tuple[str, float, str, bytes | None]:
    """The body of a Ray task: run the worker on this node; the run's files come back where the folder is not shared."""
    folder, is_shared = Path(runs), (Path(runs) / BENCH / f"shared-{token}").exists()
    if not is_shared:
        folder = Path(tempfile.gettempdir(), f"dipole-{getpass.getuser()}-{socket.gethostname()}")
        folder.mkdir(parents=True, exist_ok=True)
    outcome: Result | Task = task
    # Ray has set CUDA_VISIBLE_DEVICES of this process to the GPUs of the task.
    while isinstance(outcome := execute(task, folder, environment_for(threads, None)), Task):
        time.sleep(RETRY_TAKEN_AFTER)
    return outcome.status, outcome.seconds, outcome.message, None if is_shared else pack(folder, task.hash)


def pack(runs: Path, name: str) -> bytes:
    """A run and its log as one archive; checkpoints stay behind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in (Path(name), Path(BENCH, "logs", f"{name}.log")):
            if (runs / path).exists():
                archive.add(runs / path, arcname=str(path), filter=_without_checkpoints)
    return buffer.getvalue()


def unpack(archive: bytes, runs: Path, name: str) -> None:
    """Put a packed run in its place: the folder appears whole, or not at all."""
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


def _without_checkpoints(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(entry.name).parts[1:2] == ("checkpoints",) else entry
