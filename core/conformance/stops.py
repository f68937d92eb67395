"""Gradients that a loss stops on purpose, and the state that its calls change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

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
