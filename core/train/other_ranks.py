"""Whether another number of ranks may continue a checkpoint.

Data and views are drawn for the global batch, and the loss is that of the global batch: N ranks of B/N equal one
process of B, so weights, optimizer and queues mean the same to any number of them. What a rank draws, keeps or averages
for itself does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def unsupported_reason(ranks: Sequence[dict[str, Any]], module: nn.Module, synchronized: bool) -> str:
    """Say why another number of ranks cannot go on; "" where it can.

    Args:
        ranks: what each rank saved: "drew" (whether it drew from the global generators), "adapter".
        module: what is trained.
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
    """Whether two states are equal: tensors, numbers, strings, lists and dicts."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
