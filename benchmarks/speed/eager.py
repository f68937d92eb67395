"""What PyTorch launches: every operation of a program, counted on tensors without numbers.

Meta tensors have shapes alone, so that a matrix of any size is counted in a second, on any machine, and the code that
runs on an accelerator is what is counted.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dipole.benchmarks.speed.work import Precision, Step, Work

# Operations that compute nothing beside those that are views.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias"}
# Operations made of several kernels.
KERNELS = {"masked_fill": 2, "slice_backward": 2, "select_backward": 2, "index_add": 2, "scatter": 2, "logsumexp": 5}
# The place of the left factor of a product among the arguments.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
# An exponential for each number of the first argument.
EXPONENTIALS = {
    "exp", "exp2", "expm1", "sigmoid", "softplus", "softplus_backward", "logsumexp",
    "_softmax", "_log_softmax", "_log_softmax_backward_data",
}  # fmt: skip
# Of their first argument only what the indices name is touched.
INDEXED = {"scatter_", "scatter_add_", "index_add_", "index_put_", "gather", "index", "index_select"}
# These write their first argument without reading it.
OVERWRITTEN = {"copy_", "zero_", "fill_"}


class Counting(TorchDispatchMode):
    """Collects the work of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Work = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        empty = not any(each.numel() for each in tree_leaves(out) if isinstance(each, Tensor))
        if not func.is_view and name not in FREE and not empty:
            # Of an operation made of several kernels each touches its share.
            kernels = KERNELS.get(name, 1)
            self.work[_step(name, [*args, *(kwargs or {}).values()], out, kernels)] += kernels
        return out


def counted(run: Callable[[], Any]) -> Work:
    """The work of a call."""
    with Counting() as mode:
        run()
    return mode.work


def _step(name: str, args: Sequence[Any], out: Any, kernels: int) -> Step:
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    plain = name.rstrip("_") if not name.startswith("_") else name
    flops, precision = _products(plain, args)
    exponentials = float(tensors[0].numel()) if plain in EXPONENTIALS else 0.0
    return Step(flops, _touched(name, tensors, outputs) / kernels, exponentials / kernels, precision)


def _products(name: str, args: Sequence[Any]) -> tuple[float, Precision]:
    if name not in PRODUCTS:
        return 0.0, "float32"
    left, right = args[PRODUCTS[name] :][:2]
    if left.dtype in (torch.bfloat16, torch.float16):
        precision: Precision = "bf16"
    else:
        precision = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return 2.0 * left.numel() * right.shape[-1], precision


def _touched(name: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Bytes read and written."""
    written = [each for each in outputs if not any(each is tensor for tensor in tensors)]
    if name in INDEXED:
        self, *others = tensors
        moved = sum(map(size, others)) + sum(map(size, written))
        # As much of the first argument as the others name: read, and written where it is changed in place.
        named = max((each.numel() for each in others), default=0) if not written else written[0].numel()
        return moved + named * self.element_size() * (1 if written else 2)
    read = tensors[1:] if name in OVERWRITTEN else tensors
    return sum(map(size, read)) + sum(map(size, outputs))


def size(tensor: Tensor) -> int:
    """Bytes of the numbers that a tensor holds; those of an expanded axis once."""
    held = 1
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        held *= extent if stride else min(extent, 1)
    return held * tensor.element_size()
