"""Read the rank of this process from the environment of torchrun, accelerate, srun or mpirun.

Of several ranks that fail, only the first one prints its error: every rank meets a mistake in a recipe, and the end of
one rank is an error in all others. The ranks compare at the launcher's store (torchrun), or at a store of rank 0.
This module must not load torch, because every command imports it.
"""

import math
import os
import re
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from dipole.core.utils.errors import ConfigError

Names = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
# The variables of rank, size, local rank and local size: the first that is set counts.
_TORCH: Names = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_SLURM: Names = (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ())
_MPI: Names = (
    ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
)

PATIENCE = 5.0
"""Seconds that rank 0 keeps its store open, and that the others try to reach it."""

_answer: list[str | None] = []  # empty before the first call


@dataclass(frozen=True)
class Launched:
    """One process of a launch. The default is a single process.

    `local_*` are of this machine, `address` and `port` of the rendezvous, which torchrun (`hosted`) or rank 0 hosts.
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

    The first source with more than one process counts: torchrun, accelerate or Kubeflow (RANK and MASTER_ADDR), then
    a step of srun, then mpirun. Raise ConfigError if a variable is no number, or they contradict each other.
    """
    sources = [_MPI]
    if _is_step(environment):
        sources.insert(0, _SLURM)
    if "RANK" in environment and "MASTER_ADDR" in environment:
        sources.insert(0, _TORCH)
    source = next((each for each in sources if _number(environment, each[1], 1) > 1), None)
    if source is None:
        return Launched()
    rank, size, local_rank, local_size = map(_number, [environment] * 4, source, (0, 1, 0, 1))
    if not 0 <= rank < size:
        raise ConfigError(f"the launcher calls this process number {rank} of {size}: that cannot be.")
    address, port = "127.0.0.1", 29500
    if source is _SLURM:
        nodes = _number(environment, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1)
        local_size = math.ceil(size / nodes)
        listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if listed and nodes > 1:
            address = first_node(listed)
        # Jobs on one machine need different ports.
        job = _number(environment, ("SLURM_JOB_ID", "SLURM_JOBID"), 0)
        port = 15000 + (job * 7 + _number(environment, ("SLURM_STEP_ID",), 0)) % 16384
    return Launched(
        rank,
        size,
        local_rank,
        local_size,
        environment.get("MASTER_ADDR") or address,
        _number(environment, ("MASTER_PORT",), port),
        hosted=source is _TORCH and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    """Return the first variable that is set. The error names it."""
    for name in names:
        if text := environment.get(name):
            try:
                return int(text)
            except ValueError:
                raise ConfigError(
                    f"the launcher left {name} = {text!r} in the environment, which is no number. Start the processes "
                    "with torchrun, accelerate launch or srun, or unset it."
                ) from None
    return default


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process.

    The script of sbatch sees the number of tasks as well, but only srun sets a step.
    """
    named = any(environment.get(name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID"))
    return "SLURM_PROCID" in environment and (named or environment.get("ENVIRONMENT") != "BATCH")


def first_node(listed: str) -> str:
    """Return the first host of SLURM's short form: 'gpu[03-07,12],cpu1' -> 'gpu03'."""
    (first, *_) = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def first_message(message: str) -> str | None:
    """Return the error that another rank printed before, or None if this one is the first or alone.

    Later calls repeat the first answer.
    """
    try:
        here = launched()
    except ConfigError:  # the error to print
        return None
    if here.size == 1:
        return None
    if not _answer:
        _answer.append(_ask(here, message))
    return _answer[0]


def _ask(here: Launched, message: str) -> str | None:
    from torch.distributed import PrefixStore, TCPStore

    hosts = here.rank == 0 and not here.hosted
    try:
        whole: Any = TCPStore(
            here.address,
            here.port,
            is_master=hosts,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # A restart by torchrun prints again.
        store = PrefixStore(f"dipole/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
        first = store.add("told", 1) == 1
        if first:
            store.set("message", message)
        told = None if first else store.get("message").decode()
        store.add("heard", 1)
        end = time.monotonic() + PATIENCE
        while hosts and store.add("heard", 0) < here.size and time.monotonic() < end:
            time.sleep(0.05)
    except (RuntimeError, OSError):  # torch raises RuntimeErrors if no store answers
        return None
    return told
