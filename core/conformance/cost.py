"""Count the numbers that a call writes, in all and in its largest tensor, and their growth with the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm)


class OperationCounter(TorchDispatchMode):
    """Count inside the block the numbers of new tensors and the multiplications of products, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        old = {each.untyped_storage().data_ptr() for each in given}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in old:
                self.total += each.numel()
                self.largest = max(self.largest, each.numel())
                if func.overloadpacket in _PRODUCTS:
                    self.total += each.numel() * given[-1].shape[-2]
        return out


def cubic_share(sizes: tuple[int, ...], counts: list[int]) -> float:
    """Fit a cubic through the counts of four sizes, and return the share of its third power at the largest."""
    n = torch.tensor(sizes, dtype=torch.float64) / max(sizes)
    powers = torch.linalg.solve(n.unsqueeze(1) ** torch.arange(4), torch.tensor(counts, dtype=torch.float64))
    return float(powers[3] / counts[-1])
