"""Collectives that carry gradient: N ranks of B/N compute the loss and the gradients of one process of B.

Every rank computes the same global loss. The backward of each collective adds the gradients of all ranks, so the
average of DistributedDataParallel is the gradient of the global loss.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

PATIENCE = timedelta(hours=12)
"""Longest wait for another rank, for example while rank 0 evaluates."""

_alone = False
# Default group -> its group for CPU tensors.
_cpu_groups: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def world_size() -> int:
    """Return the number of ranks, 1 outside distributed runs and inside `as_single_process`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _alone else 1


def rank() -> int:
    """Return the number of this rank, 0 outside distributed runs and inside `as_single_process`."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def as_single_process() -> Iterator[None]:
    """Compute as a single process, while the other ranks wait (evaluation)."""
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
        # all_gather needs equal shapes, but ranks may have different numbers of rows (a last batch).
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in grad.split(ctx.sizes)]
        mine = torch.empty_like(parts[dist.get_rank()])
        dist.reduce_scatter(mine, parts)
        return mine, None


def all_numbers(numbers: Sequence[int]) -> list[list[int]]:
    """Return a few integers of every rank, in rank order, without waiting for a device."""
    mine = torch.tensor(numbers)
    found = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(found, mine, group=_of_hosts())
    rows: list[list[int]] = torch.stack(found).tolist()
    return rows


def _of_hosts() -> Any:
    """Return a group for CPU tensors. The first call may create it, so every rank must make that call."""
    world = dist.group.WORLD
    if "cpu:" in dist.get_backend_config():
        return world
    if world not in _cpu_groups:
        _cpu_groups[world] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _cpu_groups[world]


class Ballot:
    """Maximum over ranks of a number, for decisions that all ranks take at the same step.

    Every rank must make the same calls. They use CPU tensors and wait for no device.
    """

    def __init__(self) -> None:
        self._cast: tuple[Any, Tensor] | None = None

    def cast(self, mine: int) -> int:
        """Send a number, and return the maximum of the previous call (0 at first) without waiting."""
        if world_size() == 1:
            return mine
        before, number = self._cast, torch.tensor(mine)
        self._cast = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=_of_hosts(), async_op=True), number
        if before is None:
            return 0
        work, largest = before
        work.wait()
        return int(largest)

    def agree(self, mine: int) -> int:
        """Send a number, wait for the others and return the maximum."""
        if world_size() == 1:
            return mine
        return max(number for (number,) in all_numbers([mine]))


def row_counts(rows: Tensor) -> list[int]:
    """Return the number of rows of each rank."""
    return [count for (count,) in all_numbers([len(rows)])]


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """Return the rows of all ranks in rank order, (sum of sizes, ...), with gradient to the rank of each row."""
    gathered: Tensor = _Gather.apply(rows, sizes)  # type: ignore[no-untyped-call]
    return gathered


def all_sum(values: Tensor) -> Tensor:
    """Return the sum over ranks with gradient."""
    if world_size() == 1:
        return values
    total: Tensor = _AllReduce.apply(values)  # type: ignore[no-untyped-call]
    return total


def log_mean_exp(logs: Tensor, counts: Tensor) -> Tensor:
    """log( sum_i e^{logs_i} / sum_i counts_i ) over the rows of all ranks, a scalar with gradient."""
    top = logs.detach().max()
    if world_size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = all_sum((logs - top).exp().sum())
    return total.log() + top - all_sum(counts.sum().to(logs.dtype)).log()
