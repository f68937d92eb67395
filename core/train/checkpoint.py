"""Checkpoints: atomic, verified by a hash, without code in them. A run keeps the last two.

A file is `step-00000120.<16 hex digits>.safetensors`. The digits are the start of the SHA-256 of its content, so a
truncated or damaged file is recognised before anything is loaded from it.

Tensors are stored as safetensors. All other values are JSON in the header's metadata.

Another number of ranks may continue a checkpoint. Data, views and the loss belong to the global batch, so weights,
optimizer and queues fit any number of ranks. State that a rank draws, keeps or averages for itself does not.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dipole.core.train.adapter import same_data
from dipole.core.utils.errors import CheckpointError, DipoleError
from dipole.core.utils.files import disk_error, disk_refusing, file_hash, is_file, is_folder, put_in_place, scratch, why
from dipole.core.utils.plain_values import decode, encode
from dipole.core.utils.received import parse_json
from dipole.core.utils.seeding import rng_state, set_rng_state
from dipole.core.utils.text import counted, shortened

KEEP = 2
FORMAT = 1
STATE = "state"
"""The entry of the header's metadata that holds the values."""
SUFFIX = ".safetensors"
_NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.safetensors")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps and drop all but the newest two. An error leaves the earlier ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder / f"step-{step:08d}{SUFFIX}") as temporary:
            write_state(temporary, state)
            path = folder / f"step-{step:08d}.{file_hash(temporary)[:16]}{SUFFIX}"
            put_in_place(temporary, path)
    except OSError as error:
        rest = "There is no earlier checkpoint."
        if kept := list_checkpoints(folder):
            rest = f"The checkpoint of step {_step(kept[-1])} is intact."
        raise CheckpointError(f"cannot save the checkpoint of step {step} in {folder}: {why(error)} {rest}") from error
    for old in list_checkpoints(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step(path), path.stat().st_mtime_ns))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify one checkpoint, with tensors on the CPU. Raise CheckpointError if there is none."""
    if not is_file(path):
        raise CheckpointError(
            f"no checkpoint {shortened(str(path))}. Give a step-*.safetensors file, a run's folder, or --resume auto."
        )
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is no checkpoint of a run: its name must be step-<number>.<hash>.safetensors.")
    with disk_refusing(f"the checkpoint {path} cannot be read", CheckpointError):
        is_whole = file_hash(path).startswith(match[2])
    if not is_whole:
        raise CheckpointError(
            f"the checkpoint {path} is truncated or damaged ({path.stat().st_size} bytes do not match the hash in its "
            "name). Delete it; --resume auto takes the one before it."
        )
    try:
        with safe_open(path, framework="pt") as file:
            values = parse_json((file.metadata() or {})[STATE])
            # Copies, as the mapped file may be deleted.
            state = decode(values, {name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {shortened(str(error))}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint of a run.")
    return state


def starting_state(
    folder: Path, run_id: str, resume: Literal["auto", "never"] | Path, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return the checkpoint that a run continues from, or None to begin.

    "auto" takes the newest readable one, "never" none, a path that one, or the newest one of that folder. `warn` gets
    the problem of each skipped one. Raise CheckpointError if a path has no readable checkpoint, or that of another run.
    """
    if resume == "never":
        return None
    paths, problems, state = list_checkpoints(folder)[::-1], list[str](), None
    if isinstance(resume, Path):
        paths = [resume]
        if is_folder(resume):
            paths = (list_checkpoints(resume / folder.name) or list_checkpoints(resume))[::-1]
    for path in paths:
        try:
            state = load_checkpoint(path)
            break
        except CheckpointError as error:
            problems.append(str(error))
    if state is None and isinstance(resume, Path):
        raise CheckpointError("\n".join(problems) or f"there is no checkpoint in the folder {resume}.")
    if state is None and problems:
        problems.append("no checkpoint is left to continue from; starting at step 0.")
    for problem in problems:
        warn(f"warning: {problem}")
    if state is None:
        return None
    name = state.get("hash")
    if type(name) is not str or (state.get("format"), name) != (FORMAT, run_id):
        raise CheckpointError(
            f"the checkpoint belongs to another run ({shortened(str(name), 80)}), this configuration is "
            f"{folder.parent.name}. Use the configuration it was written with, or --resume never."
        )
    return state


@contextmanager
def restoring() -> Iterator[None]:
    """Raise CheckpointError with the reason for whatever goes wrong while a checkpoint is restored."""
    try:
        yield
    except DipoleError:
        raise
    except Exception as error:  # each part of a state has a reader of its own
        reason = str(error) if isinstance(error, ValueError | RuntimeError) else repr(error)
        raise CheckpointError(
            f"the checkpoint does not fit this run: {shortened(reason, 600)}. Use --resume never."
        ) from error


def write_state(path: Path, state: Any) -> None:
    """Write nested values (core/utils/plain_values.py). A tensor that occurs several times is written once."""
    tensors: dict[str, Tensor] = {}
    known: dict[Any, str] = {}
    storages: set[int] = set()

    def keep(value: Any) -> str:
        tensor = torch.as_tensor(value)
        if tensor.layout != torch.strided:
            raise CheckpointError(f"cannot save a tensor of {tensor.layout} in a checkpoint.")
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or same not in known:
            known[same] = str(len(tensors))
            copy = tensor.cpu().contiguous()
            # safetensors takes no two tensors of one storage.
            if (pointer := copy.untyped_storage().data_ptr()) in storages:
                copy = copy.clone()
            storages.add(pointer)
            tensors[known[same]] = copy
        return known[same]

    values = json.dumps(encode(state, keep, "state"), allow_nan=False)
    try:
        save_file(tensors, path, {STATE: values})
    except SafetensorError as error:
        if refused := disk_error(error):
            raise refused from error
        raise CheckpointError(f"cannot save a checkpoint: {error}") from error


# The state of a run -----------------------------------------------------------------------------------------------


def capture(run: Any) -> dict[str, Any]:
    """Return everything that continues a `Run` bit for bit, of all ranks. Every rank calls it."""
    rng = rng_state()
    mine = {"rng": rng, "drew": not same(rng, run.initial_rng), "adapter": run.adapter.state_dict()}
    ranks: list[Any] = [mine]
    if run.processes.size > 1:
        ranks = [None] * run.processes.size
        torch.distributed.all_gather_object(ranks, mine)
    state = {
        "format": FORMAT,
        "hash": run.config.hash,
        "step": run.step,
        "elapsed": run.elapsed,
        "training_seconds": run.training_seconds,
        "module": run.adapter.module.state_dict(),
        "objective": {} if run.objective is None else run.objective.state_dict(),
        "negatives": run.negatives,
        "ranks": ranks,
    }
    state |= run.update_state if run.update is None else run.update.state_dict()
    for part in run.parts:
        state |= part.state_dict()
    return state


def restore(run: Any, state: dict[str, Any]) -> None:
    """Give a new `Run` the state of a checkpoint, and the time at which its first attempt began."""
    if (record := run.folder.read_record()) is not None:
        if run.adapter.built_from_data and not same_data(run.adapter, record):
            raise CheckpointError(
                f"the data of the run {run.folder.path} have changed since its checkpoint was written, and its model "
                "is built from them. Put the old data back, or start again with --resume never."
            )
        run.started = record.started
    ranks, size = state["ranks"], run.processes.size
    is_same_size = len(ranks) == size
    synchronized = run.config.train.sync_batch_norm
    if not is_same_size and (reason := unsupported_reason(ranks, run.adapter.module, synchronized)):
        raise CheckpointError(
            f"the checkpoint was written by {counted(len(ranks), 'rank')}, this run has {size}, and {reason}. "
            "Start as many, or use --resume never."
        )
    run.adapter.module.load_state_dict(state["module"])
    if run.objective is not None:
        run.objective.load_state_dict(state["objective"])
    # If another number of ranks may continue, all ranks have the same state.
    mine = ranks[run.processes.rank if is_same_size else 0]
    run.adapter.load_state_dict(mine["adapter"])
    run.update_state = {name: state[name] for name in ("optimizer", "scaler")}
    run.step = state["step"]
    run.training_seconds = state["training_seconds"]
    run.began -= state["elapsed"]
    run.negatives = state["negatives"]
    for part in run.parts:
        part.load_state_dict(state, run)
    if is_same_size:
        set_rng_state(mine["rng"])


def unsupported_reason(ranks: Sequence[dict[str, Any]], module: nn.Module, synchronized: bool) -> str:
    """Return why another number of ranks cannot continue, or "". `synchronized`: batch norm sees all ranks' rows."""
    if any(rank["drew"] for rank in ranks):
        return "each drew random numbers of its own (dropout), which another number of ranks would draw otherwise"
    if any(not same(rank["adapter"], ranks[0]["adapter"]) for rank in ranks):
        return "each keeps something of its own (a queue of its rows)"
    if not synchronized and any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
        return "batch norm averages over the rows of one rank (train.sync_batch_norm = true would average over all)"
    return ""


def same(a: Any, b: Any) -> bool:
    """Return whether two states of tensors, numbers, strings, lists and dicts are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
