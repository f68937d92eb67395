"""Read the rank of this process from the environment of torchrun, accelerate, srun or mpirun.

This module must not load torch, because every command imports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from dipole.core.utils.errors import ConfigError

_MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
"""torch's names -> mpirun's names."""


@dataclass(frozen=True)
class Launched:
    """One process of a launch. The default is a single process.

    Attributes:
        rank, size: of this process, and the number of processes.
        local_rank, local_size: the same on this machine.
        address, port: of the rendezvous.
        hosted: whether the launcher hosts the rendezvous (torchrun), or else rank 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    hosted: bool = False

    def export(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables that torch and accelerate read."""
        environment.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_size),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Return the launch of this process.

    The first source with more than one process counts: RANK and WORLD_SIZE with MASTER_ADDR (torchrun, accelerate,
    Kubeflow), then a step of srun, then mpirun.

    Raises:
        ConfigError: a variable is not a number, or they contradict each other.
    """
    env = _Numbers(environment)
    if "RANK" in environment and "MASTER_ADDR" in environment and env("WORLD_SIZE", 1) > 1:
        found = Launched(
            env("RANK"),
            env("WORLD_SIZE"),
            env("LOCAL_RANK", 0),
            env("LOCAL_WORLD_SIZE", 1),
            hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    elif _is_step(environment) and env("SLURM_STEP_NUM_TASKS", env("SLURM_NTASKS", 1)) > 1:
        found = _of_slurm(environment, env)
    elif env.first(_MPI["WORLD_SIZE"], 1) > 1:
        rank, size, local_rank, local_size = map(env.first, _MPI.values(), (0, 1, 0, 1))
        found = Launched(rank, size, local_rank, local_size)
    else:
        return Launched()
    if not 0 <= found.rank < found.size:
        raise ConfigError(f"the launcher calls this process number {found.rank} of {found.size}: that cannot be.")
    address = environment.get("MASTER_ADDR") or found.address
    return replace(found, address=address, port=env("MASTER_PORT", found.port))


class _Numbers:
    """Numbers of an environment, with an error that names the variable."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __call__(self, name: str, default: int | None = None) -> int:
        text = self._environment.get(name) or ("" if default is None else str(default))
        try:
            return int(text)
        except ValueError:
            raise ConfigError(
                f"the launcher left {name} = {text!r} in the environment, which is no number. Start the processes with "
                "torchrun, accelerate launch or srun, or unset it."
            ) from None

    def first(self, names: tuple[str, ...], default: int) -> int:
        return next((self(name) for name in names if self._environment.get(name)), default)


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process.

    The script of sbatch sees the number of tasks as well, but only srun sets a step.
    """
    named = any(environment.get(name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID"))
    return "SLURM_PROCID" in environment and (named or environment.get("ENVIRONMENT") != "BATCH")


def _of_slurm(environment: Mapping[str, str], env: _Numbers) -> Launched:
    size = env("SLURM_STEP_NUM_TASKS", env("SLURM_NTASKS", 1))
    nodes = env("SLURM_STEP_NUM_NODES", env("SLURM_NNODES", env("SLURM_JOB_NUM_NODES", 1)))
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts = _tasks_per_node(per_node)
    node = env("SLURM_NODEID", 0)
    listed = next((environment[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if environment.get(n)), "")
    # Jobs on one machine need different ports.
    port = 15000 + (env("SLURM_JOB_ID", env("SLURM_JOBID", 0)) * 7 + env("SLURM_STEP_ID", 0)) % 16384
    return Launched(
        env("SLURM_PROCID"),
        size,
        env("SLURM_LOCALID", 0),
        counts[node] if node < len(counts) else max(1, size // max(1, nodes)),
        first_node(listed) if listed and nodes > 1 else "127.0.0.1",
        port,
    )


def _tasks_per_node(text: str) -> list[int]:
    """'2(x3),1' -> [2, 2, 2, 1], or [] if it cannot be read."""
    found = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))] if all(found) else []


def first_node(listed: str) -> str:
    """Return the first host of SLURM's short form: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else listed)
