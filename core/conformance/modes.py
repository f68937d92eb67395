"""Modes in which the kit calls a loss: stopped gradients held still, work counted, another device simulated."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_DATA: Any = Tensor.data  # a property
_STOPS = {Tensor.detach, torch.detach, _DATA.__get__, Tensor.item, Tensor.tolist, Tensor.__float__}


class Stops(TorchFunctionMode):
    """Record the values that leave the graph of a call, and return the same values in later calls.

    The later calls are then a function whose derivative is the gradient with the stops that the call has: what
    `detach`, `data`, `item` and the inside of `torch.no_grad()` give does not follow the inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []
        self._place: int | None = None  # None: remembering
        self._inside = 0  # of autograd functions, whose derivative is their own affair

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stops = func in _STOPS or not torch.is_grad_enabled()
        if self._inside or not stops:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        in_place = (name.endswith("_") and not name.startswith("__")) or name.startswith("__i")
        if self._place is None:
            before = _copied(args[0]) if in_place and isinstance(args[0], Tensor) else None
            out = func(*args, **kwargs)
            self._kept.append((tree_map_only(Tensor, _copied, out), before))
            return out
        kept, former = self._kept[self._place] if self._place < len(self._kept) else (None, None)
        self._place += 1
        if kept is None or in_place:
            out = func(*args, **kwargs)  # in place: what it changed is changed to what it was
            if isinstance(kept, Tensor) and isinstance(former, Tensor) and out.shape == kept.shape == former.shape:
                out.copy_(torch.where(former == kept, out, kept))
            return out
        return tree_map_only(Tensor, Tensor.clone, kept)

    def _call(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        apply: Any = vars(torch.autograd.Function)["apply"]  # of Python or of C, by PyTorch's version

        def counted(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return apply.__get__(None, cls)(*args, **kwargs)
            finally:
                self._inside -= 1

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(counted)), self:
            return function(*inputs)

    def held(self, function: Callable[..., Tensor], *inputs: Tensor) -> Callable[..., Tensor]:
        """Return the function with stopped values fixed at those for these inputs."""
        self._call(function, *inputs)

        def repeated(*values: Tensor) -> Tensor:
            self._place = 0
            return self._call(function, *values)

        return repeated


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone()


@contextmanager
def set_back(instance: Any) -> Iterator[None]:
    """Restore the state of an instance at the end of the block: buffers and attributes, but not parameters."""
    parts = list(instance.modules()) if isinstance(instance, nn.Module) else [instance]
    before = [(part, _kept(vars(part))) for part in parts if hasattr(part, "__dict__")]
    try:
        yield
    finally:
        for part, values in before:
            for name in vars(part).keys() - values.keys() - {"_parameters", "_modules"}:
                del vars(part)[name]
            vars(part).update(values)


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _kept_value(value) for name, value in values.items() if name not in ("_parameters", "_modules")}


def _kept_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _copied(value)
    if isinstance(value, dict | list | tuple):
        return tree_map_only(Tensor, _copied, copy.copy(value))
    if isinstance(value, nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied is no number that a loss keeps
        return value


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


DEVICE = torch.device("meta")  # the one that needs no hardware and knows autograd
# Operations in which an accelerator takes tensors of the processor: copies, and lists of indices.
_MIXED = (_aten.copy_, _aten._to_copy, _aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_)


class WrongDeviceError(RuntimeError):
    """An operation got tensors of two devices."""


class Elsewhere(Tensor):
    """A tensor that reports another device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
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
    return tree_map_only(Tensor, lambda each: known.get(id(each), Elsewhere(each)), out)
