"""A stand-in for an accelerator: tensors that compute on the CPU and report another device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DEVICE = torch.device("meta")  # the one that needs no hardware and knows autograd
_aten = torch.ops.aten
# Operations in which an accelerator takes tensors of the processor: copies, and lists of indices.
_MIXED = (_aten.copy_, _aten._to_copy, _aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_)


class WrongDeviceError(RuntimeError):
    """An operation got tensors of two devices."""


class Elsewhere(Tensor):
    """A tensor that reports another device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """Inside the block, tensors can be created on the stand-in's device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    away = [each for each in given if isinstance(each, Elsewhere)]
    here = [each for each in given if not isinstance(each, Elsewhere) and each.ndim]
    if away and here and func.overloadpacket not in _MIXED:
        raise WrongDeviceError(f"{func.overloadpacket.__name__} takes a tensor {tuple(here[0].shape)} of the processor")
    asked = kwargs.get("device")
    goes = bool(away) if asked is None else torch.device(asked) == DEVICE
    if func.overloadpacket is _aten.copy_:
        goes = isinstance(args[0], Elsewhere)
    plain_args, plain = tree_map_only(Elsewhere, lambda each: each.held, (args, kwargs))
    if asked is not None:
        plain = plain | {"device": torch.device("cpu")}
    out = func(*plain_args, **plain)
    if not goes:
        return out
    known = {id(each.held): each for each in away}
    return tree_map(lambda each: known.get(id(each), Elsewhere(each)) if isinstance(each, Tensor) else each, out)
