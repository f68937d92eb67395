"""Save the state of a run between two steps, and continue a run from a checkpoint.

Another number of ranks may continue a checkpoint. Data, views and the loss belong to the global batch, so weights,
optimizer and queues fit any number of ranks. State that a rank draws, keeps or averages for itself does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dipole.core.train.adapter import same_data
from dipole.core.train.checkpoint import FORMAT
from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.seeding import rng_state, set_rng_state
from dipole.core.utils.text import counted


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
        "optimizer": {} if run.optimizer is None else run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "negatives": run.negatives,
        "ranks": ranks,
    }
    for callback in run.callbacks:
        state |= callback.state_dict()
    return state


def restore(run: Any, state: dict[str, Any]) -> None:
    """Give a new `Run` the state of a checkpoint. The optimizer, which is built later, finds its own there.

    Raises:
        CheckpointError: it does not fit the model or the number of ranks.
    """
    ranks, size = state["ranks"], run.processes.size
    reason = ""
    if len(ranks) != size:
        reason = unsupported_reason(ranks, run.adapter.module, run.config.train.sync_batch_norm)
    if reason:
        raise CheckpointError(
            f"the checkpoint was written by {counted(len(ranks), 'rank')}, this run has {size}, and {reason}. "
            "Start as many, or use --resume never."
        )
    try:
        run.adapter.module.load_state_dict(state["module"])
        if run.objective is not None:
            run.objective.load_state_dict(state["objective"])
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}. Use --resume never.") from error
    # If another number of ranks may continue, all ranks have the same state.
    mine = ranks[run.processes.rank if len(ranks) == size else 0]
    run.adapter.load_state_dict(mine["adapter"])
    run.optimizer_state = state["optimizer"]
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.step = state["step"]
    run.training_seconds = state["training_seconds"]
    run.began -= state["elapsed"]
    run.negatives = state["negatives"]
    for callback in run.callbacks:
        callback.load_state_dict(state, run)
    if len(ranks) == size:
        set_rng_state(mine["rng"])


def first_start(run: Any) -> str | None:
    """Return when the first attempt of a run began; None if there is no record.

    Raises:
        CheckpointError: the data have changed, and the model is built from them.
    """
    record = run.folder.read_record()
    if record is None:
        return None
    if run.adapter.built_from_data and not same_data(run.adapter, record):
        raise CheckpointError(
            f"the data of the run {run.folder.path} have changed since its checkpoint was written, and its model is "
            "built from them. Put the old data back, or start again with --resume never."
        )
    started: str = record.started
    return started


def unsupported_reason(ranks: Sequence[dict[str, Any]], module: nn.Module, synchronized: bool) -> str:
    """Return why another number of ranks cannot continue. Empty if it can.

    Args:
        ranks: what each rank saved: "drew" (whether it drew from the global generators), "adapter".
        module: the trained module.
        synchronized: whether batch norm sees the rows of all ranks.
    """
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
