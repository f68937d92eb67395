"""The SLURM engine: jobs of a SLURM array, through submitit (extra `slurm`).

All nodes have to share the runs folder. submitit submits a job again that meets its time limit or is pre-empted. The
run then continues from its checkpoint.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dipole.benchmarks.manifest import BENCH
from dipole.benchmarks.run.engine import (
    RETRY_HELD_AFTER,
    Engine,
    EngineTask,
    TaskResult,
    environment_for,
    failed,
    run_worker,
)
from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.extras import needing

SLOTS = 16
THREADS = 4
MINUTES = 24 * 60


class SlurmEngine(Engine):
    """Tasks as the jobs of a SLURM array, one node each.

    Args:
        jobs: array jobs at a time. Default: 16.
        threads: cores of a job. Default: 4.
        options: of sbatch, by submitit's names: partition, account, qos, time (minutes), gpus_per_node, mem, ...
        cluster: "slurm", or "local" for processes on this machine.
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
            time.sleep(RETRY_HELD_AFTER)
        return result

    def checkpoint(self, task: EngineTask, runs: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task, runs)
