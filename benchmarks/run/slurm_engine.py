"""The SLURM engine: the same workers as jobs of an array, through submitit (extra `slurm`).

The runs folder has to be on a disk that all nodes share. A job that meets its time limit, or is pre-empted, is
submitted again by submitit and goes on from its checkpoint; one that is killed is submitted once more.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dipole.benchmarks.run.engines import RETRY_TAKEN_AFTER
from dipole.benchmarks.run.machine import environment_for
from dipole.benchmarks.run.tasks import Result, Task, execute, log_of
from dipole.benchmarks.run_records import BENCH
from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.extras import install_line

SLOTS = 16
LOOK_EVERY = 5.0
MINUTES = 24 * 60


class SlurmEngine:
    """Tasks as the jobs of a SLURM array, one node each."""

    def __init__(
        self,
        jobs: int | None = None,
        threads: int | None = None,
        options: Mapping[str, str] | None = None,
        cluster: str = "slurm",
    ) -> None:
        """Args:
        jobs: array jobs at a time; default 16.
        threads: cores of a job; default 4.
        options: of sbatch, by submitit's names: partition, account, qos, time (minutes), gpus_per_node, mem, ...
        cluster: "slurm", or "local" for processes on this machine.
        """
        try:
            import submitit
            from submitit.slurm.slurm import SlurmExecutor
        except ModuleNotFoundError as error:
            raise ConfigError(f"--engine slurm needs submitit. Install it with: {install_line('slurm')}") from error
        if cluster == "slurm" and SlurmExecutor.affinity() < 0:
            raise ConfigError(
                "--engine slurm: there is no sbatch on this machine. Start it on a login node of the cluster, or use "
                "--engine local."
            )
        known = sorted(SlurmExecutor._valid_parameters())
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"--slurm {name}: no such option.{nearest(name, known)} Allowed: {', '.join(known)}.")
        self.submitit: Any = submitit
        self.cluster, self.options = cluster, dict(options or {})
        self.threads, self.slots = threads or 4, jobs or SLOTS

    def run(self, tasks: Sequence[Task], runs: Path) -> Iterator[Result]:
        """Submit all tasks as one array and yield results as they come."""
        executor = self._executor(runs, max((task.processes for task in tasks), default=1))
        pending: list[tuple[Task, Any]] = []
        again: list[Task] = []
        if tasks:
            with executor.batch():
                submitted = [executor.submit(OnNode(self.threads), task, str(runs.resolve())) for task in tasks]
            pending = list(zip(tasks, submitted, strict=True))
        try:
            while pending:
                for entry in [each for each in pending if each[1].done()]:
                    pending.remove(entry)
                    task, job = entry
                    if self._is_lost(job) and task not in again:
                        again.append(task)
                        pending.append((task, executor.submit(OnNode(self.threads), task, str(runs.resolve()))))
                    else:
                        yield self._result(task, job, runs)
                time.sleep(0 if not pending else 0.2 if self.cluster == "local" else LOOK_EVERY)
        finally:
            # Reached by Ctrl-C and by a caller that stops listening as well.
            for _, job in pending:
                job.cancel()

    def _executor(self, runs: Path, processes: int) -> Any:
        executor = self.submitit.AutoExecutor(folder=runs.resolve() / BENCH / "slurm", cluster=self.cluster)
        executor.update_parameters(timeout_min=MINUTES, cpus_per_task=self.threads, name="dipole")
        if self.cluster == "slurm":
            own = {"array_parallelism": self.slots} | ({"gpus_per_node": processes} if processes > 1 else {})
            given = {f"slurm_{name}": _typed(value) for name, value in (own | self.options).items()}
            executor.update_parameters(**given)
        return executor

    def _is_lost(self, job: Any) -> bool:
        """Whether a job ended without an answer: killed, for its memory or with its node."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        error = job.exception()
        return isinstance(error, UncompletedJobError) and not isinstance(error, FailedJobError)

    def _result(self, task: Task, job: Any, runs: Path) -> Result:
        error = job.exception()
        if error is None:
            found: Result = job.result()
            # The node may know the folder by another path.
            return replace(found, task=task, log=log_of(task, runs))
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Result(task, "failed", 0.0, log_of(task, runs), f"job {job.job_id}: {lines[-1]}")


class OnNode:
    """The body of a job: run the worker on this node; submitted once more where its time was too short."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __call__(self, task: Task, runs: str) -> Result:
        while isinstance(outcome := execute(task, Path(runs), environment_for(self.threads, None)), Task):
            time.sleep(RETRY_TAKEN_AFTER)
        return outcome

    def checkpoint(self, task: Task, runs: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task, runs)


def _typed(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value
