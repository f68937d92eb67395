"""Collectives that carry gradient: N ranks of B/N compute the loss and the gradients of one process of B.

Every rank forms the same global loss; the backward of each collective adds the gradients of all ranks. The average
that DistributedDataParallel takes afterwards is then the gradient of the global loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_alone = False


def world_size() -> int:
    """Number of ranks; 1 outside distributed runs and inside `alone`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _alone else 1


def rank() -> int:
    """Number of this rank; 0 outside distributed runs and inside `alone`."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def alone() -> Iterator[None]:
    """Compute as a single process: for what one rank does while the others wait (evaluation)."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        # Ranks may hold different numbers of rows (a last batch), while all_gather needs equal shapes.
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.split(ctx.sizes)[dist.get_rank()], None


def all_numbers(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The same few integers of every rank, in rank order."""
    mine = torch.tensor(numbers, device=device)
    found = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(found, mine)
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows


def row_counts(rows: Tensor) -> list[int]:
    """Number of rows that each rank holds."""
    return [count for (count,) in all_numbers([len(rows)], rows.device)]


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """Rows of all ranks in rank order, (sum of sizes, ...); the gradient flows back to the rank each row came from."""
    gathered: Tensor = _Gather.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return gathered


def all_sum(values: Tensor) -> Tensor:
    """Sum over ranks with gradient; the values themselves in a single process."""
    if world_size() == 1:
        return values
    total: Tensor = _AllReduce.apply(values)  # type: ignore[no-untyped-call]
    return total


def log_mean_exp(logs: Tensor, counts: Tensor) -> Tensor:
    """log( sum_i e^{logs_i} / sum_i counts_i ) over the rows of all ranks; scalar with gradient."""
    top = logs.detach().max()
    if world_size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = all_sum((logs - top).exp().sum())
    return total.log() + top - all_sum(counts.sum().to(logs.dtype)).log()
