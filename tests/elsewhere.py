"""A device with numbers that is none: its tensors lie apart from the processor's, and mixing the two is an error.

It goes by the name of "meta", but its tensors hold numbers. Unlike `device_reads`, values may be read back: what is
held is that nothing is computed with tensors of both, and nothing of some size comes back unasked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

ELSEWHERE = torch.device("meta")
# Of these the positions may lie on the processor.
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Far(Tensor):
    """A tensor of the device; `near` holds its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "Far":
        made: Far = Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=ELSEWHERE
        )
        made.near = near
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near!r})"

    # What goes past dispatch, or ends in a tensor of "meta" that has no numbers.

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> "Far":  # type: ignore[override]
        return Far(self.near.new_tensor(data, **kwargs))

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Tensors that are made on the device."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {}, self.largest)


def _run(function: Any, args: Any, kwargs: Any, largest: int | None = None) -> Any:
    name = function.overloadpacket.__name__
    leaves, shape = tree_flatten((args, kwargs))
    far = [each for each in leaves if isinstance(each, Far)]
    near = [each for each in leaves if isinstance(each, Tensor) and not isinstance(each, Far) and each.ndim]
    device = kwargs.get("device")
    copies = name in ("_to_copy", "copy_")
    if far and near and not copies and not (name in INDEXED and isinstance(args[0], Far)):
        raise AssertionError(
            f"{function} takes tensors of the processor {[tuple(each.shape) for each in near]} as well"
        )
    there = bool(far) if device is None else torch.device(device) == ELSEWHERE
    if name == "copy_":
        there = isinstance(args[0], Far)
    if far and not there and largest is not None and far[0].numel() > largest:
        raise AssertionError(f"{function} brings {tuple(far[0].shape)} back to the processor")
    held = {id(each.near): each for each in far}
    given, options = tree_unflatten([each.near if isinstance(each, Far) else each for each in leaves], shape)
    if device is not None:
        options["device"] = torch.device("cpu")
    found = function(*given, **options)
    if name == "_to_copy" and any(found is each.near for each in far):
        found = found.clone()

    def wrapped(x: Any) -> Any:
        if not there or not isinstance(x, Tensor):
            return x
        return held[id(x)] if id(x) in held else Far(x)

    return tree_map(wrapped, found)


@contextmanager
def elsewhere(largest: int) -> Iterator[None]:
    """Inside, the device is there; copies of more than `largest` numbers back to the processor are errors."""
    with _Device(largest):
        yield


def sent(x: Tensor) -> Tensor:
    """A copy on the device."""
    return Far(x.detach().clone())
