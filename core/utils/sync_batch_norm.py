"""Batch norm over the rows of all ranks: N ranks of B/N rows are one process of B.

    y = weight (x - mean) / sqrt(var + eps) + bias        mean and var over rows and places of all ranks

The modules keep their classes (`nn.BatchNorm2d` and so on) and names, so saved weights load everywhere. In one process
and in evaluation mode they do not change. PyTorch's `SyncBatchNorm` needs a GPU. This one also runs on a CPU.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.utils.distributed import all_sum, world_size
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
    axes, along = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sums = all_sum(torch.cat([wide.sum(axes), wide.new_full((1,), x.numel() // x.shape[1])]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(along)
    # Two passes, because E[x^2] - E[x]^2 loses digits.
    var = all_sum(centred.square().sum(axes)) / count
    if self.track_running_stats:
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1 / self.num_batches_tracked
        unbiased = var.detach() * (count / (count - 1).clamp_min(1))
        for kept, new in ((self.running_mean, mean.detach()), (self.running_var, unbiased)):
            kept.add_((new - kept) * share)
    scale = (var + self.eps).rsqrt()
    if self.weight is not None:
        scale = scale * self.weight
    y: Tensor = centred * scale.view(along)
    if self.bias is not None:
        y = y + self.bias.to(y.dtype).view(along)
    return y.to(x.dtype)


_forward.__name__ = "forward"  # under this name a bound method is pickled
