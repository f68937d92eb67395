"""Batch norm over the rows of all ranks: N ranks of B/N rows are one process of B.

    y = weight (x - mean) / sqrt(var + eps) + bias        mean and var over rows and places of all ranks

The modules keep their classes (`nn.BatchNorm2d` and so on) and names, so saved weights load everywhere. In one process
and in evaluation mode they do not change. PyTorch's `SyncBatchNorm` needs a GPU. This one also runs on a CPU.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dipole.core.utils.distributed import world_size
from dipole.core.utils.uncompiled import uncompiled


def synchronize(module: nn.Module) -> int:
    """Make every batch norm of a module use the rows of all ranks in training. Return how many there are.

    Every rank must call them equally often and in the same order. Copies of the module are synchronized too.
    """
    found = [each for each in module.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for each in found:
        each.__dict__["forward"] = MethodType(_forward, each)
    return len(found)


@uncompiled
def _forward(self: Any, x: Tensor) -> Tensor:
    if not self.training or world_size() == 1:
        plain: Tensor = type(self).forward(self, x)
        return plain
    self._check_input_dim(x)
    axes = [0, *range(2, x.ndim)]
    with torch.no_grad():
        wide = x.double() if x.dtype == torch.double else x.float()
        rows = wide.new_full((1,), x.numel() // x.shape[1])
        sums = torch.cat([wide.sum(axes), rows])
        dist.all_reduce(sums)
        count = sums[-1]
        mean = sums[:-1] / count
        # Two passes, because E[x^2] - E[x]^2 loses digits.
        var = (wide - _along(mean, x)).square().sum(axes)
        dist.all_reduce(var)
        var /= count
        if self.track_running_stats:
            _remember(self, mean, var * (count / (count - 1).clamp_min(1)))
    found: Tensor = _Normalized.apply(x, self.weight, self.bias, mean, (var + self.eps).rsqrt(), count)  # type: ignore[no-untyped-call]
    return found


_forward.__name__ = "forward"  # under this name a bound method is pickled


def _along(values: Tensor, like: Tensor) -> Tensor:
    """(C,) as (1, C, 1, ...)."""
    return values.view(1, -1, *[1] * (like.ndim - 2))


def _remember(norm: Any, mean: Tensor, var: Tensor) -> None:
    norm.num_batches_tracked.add_(1)
    share = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
    for kept, new in ((norm.running_mean, mean), (norm.running_var, var)):
        kept.lerp_(new.to(kept.dtype), share) if isinstance(share, float) else kept.add_((new - kept) * share)


class _Normalized(torch.autograd.Function):
    """Sum the gradients of mean and variance over ranks. Weight and bias get this rank's share."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, count: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.has_bias = bias is not None
        y = (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)
        if weight is not None:
            y = y * _along(weight.to(y.dtype), x)
        if bias is not None:
            y = y + _along(bias.to(y.dtype), x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        axes = [0, *range(2, x.ndim)]
        grad = grad.to(mean.dtype)
        unit = (x.to(mean.dtype) - _along(mean, x)) * _along(scale, x)
        of_bias, of_weight = grad.sum(axes), (grad * unit).sum(axes)
        over_all = torch.stack([of_bias, of_weight])
        dist.all_reduce(over_all)
        over_all /= count
        of_x = (grad - _along(over_all[0], x) - unit * _along(over_all[1], x)) * _along(scale, x)
        if weight is not None:
            of_x = of_x * _along(weight.to(of_x.dtype), x)
        learnt = None if weight is None else of_weight.to(weight.dtype)
        shift = of_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return of_x.to(x.dtype), learnt, shift, None, None, None
