"""The device and the processes of a run. accelerate joins several processes."""

import os
import re
from typing import Any

import torch
from torch import nn

from dipole.core.train.config import DEVICES, RunConfig
from dipole.core.utils.distributed import PATIENCE
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.launched import Launched, launched
from dipole.core.utils.machine import processors

_WHOLE = (
    "dipole keeps whole weights on every GPU (DistributedDataParallel): choose multi-GPU in `accelerate config`, or "
    "start with torchrun. What saves memory: train.microbatch, train.activation_checkpointing and "
    "train.precision = bf16-mixed."
)
_UNSUPPORTED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor and context parallelism",
}
_PRECISIONS = {"32": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""train.precision -> accelerate's --mixed_precision."""


def pick_device(text: str) -> torch.device:
    """Return the device of "auto", "cpu", "cuda", "cuda:1" or "mps". Raise ConfigError if it is not available."""
    wants_cpu = _is_on("ACCELERATE_USE_CPU")
    if wants_cpu and text not in ("auto", "cpu"):
        raise ConfigError(f'device: {text!r} contradicts `accelerate launch --cpu`. Use device = "auto" or "cpu".')
    if text == "auto":
        for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
            if backend.is_available() and not wants_cpu:
                return torch.device(name)
        return torch.device("cpu")
    if not re.fullmatch(DEVICES, str(text)):
        raise ConfigError(f"device: {text!r} is none. Allowed: auto, cpu, cuda, cuda:1, mps.")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {text!r} is not here ({torch.cuda.device_count()} CUDA devices found). "
            'Use device = "auto" or "cpu"; `dipole doctor` says more.'
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError('device: "mps" is not here. Use device = "auto" or "cpu".')
    return device


class Processes:
    """The processes of a run: the rank of this one, and collective operations. One process has no `Accelerator`."""

    def __init__(self, device: torch.device, accelerator: Any = None) -> None:
        self.device = device
        self._accelerator = accelerator
        self.rank, self.size = 0, 1
        if accelerator:
            self.rank, self.size = accelerator.process_index, accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Return whether this process evaluates, writes and logs."""
        return self.rank == 0

    def wrap(self, step: nn.Module) -> nn.Module:
        """Return the step with gradients averaged over the processes."""
        if self._accelerator is None:
            return step
        wrapped: nn.Module = self._accelerator.prepare_model(step)
        return wrapped

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the group. A process that ends with an open group would wait for the others for ever."""
        if self._accelerator:
            leave()


def leave() -> None:
    """Leave the group of processes, if there is one. The next `launch` makes another."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from accelerate.state import AcceleratorState

        torch.distributed.destroy_process_group()
        # accelerate would keep using the old group.
        AcceleratorState._reset_state(True)


def launch(config: RunConfig) -> Processes:
    """Join the processes that torchrun, accelerate, srun or mpirun started."""
    _refuse(config)
    device = pick_device(config.device)
    here = launched()
    if here.size == 1:
        return Processes(device)
    _place(here, device)
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    try:
        accelerator = Accelerator(
            cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)]
        )
    except ValueError as error:
        raise ConfigError(f"the processes cannot be joined: {error}") from error
    return Processes(accelerator.device, accelerator)


def _place(here: Launched, device: torch.device) -> None:
    """Choose this process's GPU or threads, and export its rank to torch."""
    if device.type == "mps":
        raise ConfigError("device: mps trains in one process. Start it without a launcher, or use device = cpu.")
    if device.index is not None:
        raise ConfigError(
            f'device: "{device}" is one GPU, but each of the {here.size} processes takes its own. Use device = "cuda".'
        )
    local = here.local_rank
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 1:
            local = 0  # srun --gpus-per-task=1 shows every task its own
        elif local >= count:
            raise ConfigError(
                f"process {here.rank} of {here.size} is number {local} on its machine, which has {count} GPUs. "
                'Start one process for each GPU, or use device = "cpu".'
            )
    elif "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does: otherwise each of n processes would use all processors.
        own = processors()
        threads = int(os.environ.get("SLURM_CPUS_PER_TASK") or max(1, own // here.local_size))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    here.export(os.environ)
    os.environ["LOCAL_RANK"] = str(local)


def fewer_than_asked() -> str:
    """Return a warning if accelerate started one process on CPUs although several were requested, or ""."""
    if not _is_on("ACCELERATE_USE_CPU") or "MASTER_ADDR" not in os.environ or launched().size > 1:
        return ""
    return (
        "accelerate launch --cpu has started one process, as it does without --mpirun_hostfile. Several on CPUs: "
        "accelerate launch --multi_gpu --num_processes N (also where there is no GPU), torchrun, or srun"
    )


def _refuse(config: RunConfig) -> None:
    """Refuse accelerate's settings that the training loop would ignore."""
    for variable, name in _UNSUPPORTED.items():
        if _is_on(variable):
            raise ConfigError(f"accelerate is set to {name} ({variable}), which dipole does not train with. {_WHOLE}")
    if os.environ.get("PJRT_DEVICE", "").upper() == "TPU":
        raise ConfigError(f"TPUs (torch_xla) are not what dipole trains on: use a machine with GPUs. {_WHOLE}")
    asked, precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(), config.train.precision
    if asked not in ("no", _PRECISIONS[precision]):
        wanted = next((name for name, theirs in _PRECISIONS.items() if theirs == asked), "bf16-mixed")
        raise ConfigError(
            f"accelerate is set to --mixed_precision {asked}, the recipe to train.precision = {precision!r}, which is "
            f"part of what identifies a run. Give --set train.precision={wanted}, or --mixed_precision no."
        )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise ConfigError(
            "accelerate is set to compile (--dynamo_backend): give --set train.compile=true, which is on record."
        )
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") not in ("", "1"):
        raise ConfigError(
            "accelerate is set to accumulate gradients: give --set train.microbatch=ROWS, which contrasts all rows."
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")
