"""A forward pass that is run again comes out the same: random numbers, buffers and autocast as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class RngAndBuffers:
    """The states of the global generators and copies of a module's buffers, at the time when it is made.

    Buffers are batch norm's running statistics, the vectors of spectral norm: what a forward pass leaves behind.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._states = _states(device)
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def nothing_drawn(self) -> bool:
        """Whether no random number was drawn since."""
        return all(map(torch.equal, self._states, _states(self._device)))

    def rewind_random(self) -> None:
        """Let the same random numbers come again."""
        for state, (_, write, place) in zip(self._states, _generators(self._device), strict=True):
            write(state, *place)

    def rewind(self) -> None:
        """Go back, buffers included; autograd does not notice, as no graph reads a buffer that a pass changes."""
        self.rewind_random()
        for buffer, copy in self._buffers:
            buffer.data.copy_(copy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Go back, run a block, and return to where things stood before it."""
        now = RngAndBuffers(self._module, self._device)
        self.rewind()
        try:
            yield
        finally:
            now.rewind()


def _generators(device: torch.device) -> Iterator[tuple[Any, Any, tuple[torch.device, ...]]]:
    """How the state of each generator is read and written, and the arguments of both."""
    yield torch.get_rng_state, torch.set_rng_state, ()
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        yield module.get_rng_state, module.set_rng_state, () if device.type == "mps" else (device,)


def _states(device: torch.device) -> list[Tensor]:
    return [read(*place) for read, _, place in _generators(device)]


class Autocast:
    """Whether autocast is on where it is made, and for what dtype; entering gives it back.

    Casts are not cached: one that a pass without gradient has made would cut the gradient of the next.
    """

    def __init__(self, device: torch.device) -> None:
        kinds = {kind for kind in ("cpu", device.type) if torch.amp.is_autocast_available(kind)}
        self._settings = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in sorted(kinds)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Autocast as it was."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._settings:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


# One number for each element, whatever the others are. Attention with dropout is not of them: its backward draws again.
_ELEMENTWISE = frozenset(
    ("bernoulli", "bernoulli_", "native_dropout", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
     "random_", "uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_")
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the rows stand in a random tensor: the dimension, its elements for each row, and how memory is ordered."""

    dim: int
    each: int
    order: tuple[int, ...]


class WholeBatchDraws(TorchDispatchMode):
    """Rows `start` to `stop` of a batch of `total` draw what they draw when the whole batch is there.

    Every random tensor with a place for each row is drawn for all rows and cut; one without (a mask that all rows
    share) is drawn as it is. The global generators must stand where they stood before the batch.

    Rows are the first dimension, or the first is a multiple of them (heads of attention folded into the batch), or
    else the first dimension of that size (time before batch). The first part of a batch decides: of a single row at
    its end, folded heads could not be told from it.

    Args:
        start, stop, total: which rows.
        places: where the rows stand in each draw; the first part fills the list, the others read it.
    """

    def __init__(self, start: int, stop: int, total: int, places: list[Place | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start, self._rows, self._total = start, stop - start, total
        self._places, self._number = places, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name not in _ELEMENTWISE:
            return func(*args, **kwargs)
        place = self._next(next(each for each in args if _shape(each) is not None))
        if place is None:
            return func(*args, **kwargs)
        drawn = func(*(self._widened(each, place) for each in args), **kwargs)
        cut = tuple(self._cut(each, place) for each in drawn) if isinstance(drawn, tuple) else self._cut(drawn, place)
        return args[0].copy_(cut) if name.endswith("_") else cut

    def _next(self, like: Any) -> Place | None:
        """Where the rows stand in the draw that comes now."""
        if self._start == 0:
            self._places.append(self._place(like))
        self._number += 1
        place = self._places[self._number - 1] if self._number <= len(self._places) else self._place(like)
        return place if place is None or self._fits(like, place) else self._place(like)

    def _place(self, like: Any) -> Place | None:
        shape, rows = _shape(like) or (), self._rows
        strides = like.stride() if isinstance(like, Tensor) else range(len(shape), 0, -1)
        order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
        if shape and shape[0] == rows:
            return Place(0, 1, order)
        if shape and shape[0] % rows == 0 and shape[0] > rows > 1:
            return Place(0, shape[0] // rows, order)
        return Place(shape.index(rows), 1, order) if rows in shape[1:] and shape[0] > 1 else None

    def _fits(self, value: Any, place: Place) -> bool:
        shape = _shape(value)
        return shape is not None and len(shape) == len(place.order) and shape[place.dim] == self._rows * place.each

    def _widened(self, value: Any, place: Place) -> Any:
        """A tensor or a shape of these rows as one of all rows, zero elsewhere; anything else as it is."""
        if not self._fits(value, place):
            return value
        whole = [*(_shape(value) or ())]
        whole[place.dim] = self._total * place.each
        if not isinstance(value, Tensor):
            return whole
        # Numbers are drawn in the order of memory.
        wide = torch.empty_permuted(whole, place.order, dtype=value.dtype, device=value.device).zero_()
        self._cut(wide, place).copy_(value)
        return wide

    def _cut(self, value: Tensor, place: Place) -> Tensor:
        return value.narrow(place.dim, self._start * place.each, self._rows * place.each)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Of a tensor, or of a list that is a shape."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return tuple(value) if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value) else None
