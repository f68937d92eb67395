"""An encoder that sees some rows at a time while the loss sees all: what GradCache does in two passes.

The first pass keeps embeddings and no graph. When their gradient is known, the backward pass runs the encoder again on
the same rows, as it was then, and carries the gradient of these rows to the parameters. All of this is one node of
the outer graph, whose inputs are the parameters: each gets its whole gradient once, so that hooks, gradient clipping
by tensor, DistributedDataParallel and `torch.autograd.grad` see what they see without the division.

    dL/dtheta = sum_chunks (d encoder(x_chunk) / dtheta)^T dL/dz_chunk      (Gao et al. 2021, Eqs. 6 and 7)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dipole.core.utils.errors import PairsError
from dipole.core.utils.replay import Autocast, Place, RngAndBuffers, WholeBatchDraws

Draws = Literal["batch", "microbatch"]
"""Random numbers in an encoder: those of the undivided batch, or each microbatch its own, one after another."""


def microbatched(
    module: nn.Module, size: int, draws: Draws = "batch", run: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A forward pass of `module` that computes `size` rows at a time, to stand in its place (`instead`).

    Args:
        module: takes rows and gives a row for each: tensors, or tuples, lists and dicts of them. What it takes may
            also be an object with `split(size)` and `len`. What has no rows is given to every call.
        size: rows at a time, >= 1.
        draws: "batch" has every row draw (dropout) what it draws in the undivided batch, at the price of drawing for
            the whole batch each time; "microbatch" draws as a plain loop over microbatches would.
        run: the forward pass of `size` rows; default the module's own.

    Raises:
        PairsError: from the call, where what goes in or comes out has no row for each instance.
    """
    undivided = own_forward(module) if run is None else run

    def forward(*args: Any, **kwargs: Any) -> Any:
        rows = _rows(module, (args, kwargs))
        if rows <= size:
            return undivided(*args, **kwargs)
        passes = _Passes(module, undivided, (args, kwargs), rows, size, draws)
        if not torch.is_grad_enabled() or not passes.leaves:
            return passes.outer(passes.first())
        return passes.outer(_Microbatched.apply(passes, *passes.leaves))  # type: ignore[no-untyped-call]

    return forward


@contextmanager
def patched_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of `module` go to another forward pass; names, weights and hooks stay as they are."""
    had, compiled = module.__dict__.get("forward"), module._compiled_call_impl
    module.__dict__["forward"] = forward
    module._compiled_call_impl = None
    try:
        yield
    finally:
        module._compiled_call_impl = compiled
        if had is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = had


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward pass of a module as it is now, compiled if it is."""
    forward, compiled = module.forward, module._compiled_call_impl
    if compiled is None:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with patched_forward(module, forward):
            return compiled(*args, **kwargs)

    return run


class _Passes:
    """The passes of one call: what it was given and how that is cut, and how things stood when it began."""

    def __init__(
        self, module: nn.Module, run: Callable[..., Any], given: Any, rows: int, size: int, draws: Draws
    ) -> None:
        self._module, self._run, self._given, self._size = module, run, given, size
        self._cuts = list(pairwise([*range(0, rows, size), rows]))
        given_leaves = list(_leaves(given))
        self._wanted = [n for n, each in enumerate(given_leaves) if isinstance(each, Tensor) and each.requires_grad]
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.leaves = [*self._parameters, *(given_leaves[n] for n in self._wanted)]
        like = [*module.parameters(), *(each for each in given_leaves if isinstance(each, Tensor)), torch.empty(0)]
        self._device = like[0].device
        self._autocast = Autocast(self._device)
        self._began = RngAndBuffers(module, self._device)
        self._whole = draws == "batch"
        self._places: list[Place | None] = []
        self._spec: TreeSpec | None = None

    def first(self) -> tuple[Tensor, ...]:
        """All rows of every output, without a graph."""
        found: list[tuple[Tensor, ...]] = []
        self._places = []
        for number, part in enumerate(self._parts()):
            with torch.no_grad(), self._as_then(number):
                found.append(self._call(number, part))
            # Whether anything is random shows in the first part.
            if number == 0 and self._began.nothing_drawn():
                self._whole = False
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def again(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of `leaves`, given those of the outputs."""
        learnt: list[Tensor | None] = [None] * len(self._parameters)
        inputs: list[list[Tensor]] = [[] for _ in self._wanted]
        self._places = []  # a segment that is computed again inside of this pass draws as well
        with self._began.again():
            for number, part in enumerate(self._parts()):
                for place in self._wanted:
                    part[place] = part[place].detach().requires_grad_()
                own = [part[place] for place in self._wanted]
                found = self._backward(number, part, [*self._parameters, *own], grads)
                learnt = [_sum(before, grad) for before, grad in zip(learnt, found[: len(learnt)], strict=True)]
                for parts, x, grad in zip(inputs, own, found[len(learnt) :], strict=True):
                    parts.append(torch.zeros_like(x) if grad is None else grad)
        return [*learnt, *map(torch.cat, inputs)]

    def outer(self, outputs: tuple[Tensor, ...]) -> Any:
        """Outputs as the module returns them."""
        assert self._spec is not None  # the first pass has seen it
        return tree_unflatten(outputs, self._spec)

    def _backward(
        self, number: int, part: list[Any], leaves: list[Tensor], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        start, stop = self._cuts[number]
        with self._as_then(number):
            with torch.enable_grad():
                outputs = self._call(number, part)
            with_grad = [
                (output, grad[start:stop])
                for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and output.requires_grad
            ]
            if not with_grad:
                return [None] * len(leaves)
            heads, injected = zip(*with_grad, strict=True)
            return torch.autograd.grad(heads, leaves, injected, allow_unused=True)

    def _parts(self) -> Iterator[list[Any]]:
        """The leaves of what is given, `size` rows at a time."""
        cut = [each.split(self._size) if _has_rows(each) else None for each in _leaves(self._given)]
        for number in range(len(self._cuts)):
            yield [
                each if parts is None else parts[number] for each, parts in zip(_leaves(self._given), cut, strict=True)
            ]

    @contextmanager
    def _as_then(self, number: int) -> Iterator[None]:
        """Autocast as at the call, and random numbers as part `number` draws them."""
        start, stop = self._cuts[number]
        if self._whole and number:
            self._began.rewind_random()
        draws = WholeBatchDraws(start, stop, self._cuts[-1][1], self._places) if self._whole else nullcontext()
        with self._autocast.again(), draws:
            yield

    def _call(self, number: int, part: list[Any]) -> tuple[Tensor, ...]:
        args, kwargs = _rebuilt(self._given, iter(part))
        outputs, self._spec = tree_flatten(self._run(*args, **kwargs))
        start, stop = self._cuts[number]
        wrong = [each for each in outputs if not isinstance(each, Tensor) or not each.ndim or len(each) != stop - start]
        if wrong or not outputs:
            shown = [f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in wrong]
            raise PairsError(
                f"{type(self._module).__name__} was given {stop - start} rows and must return tensors with a row for "
                f"each; got {', '.join(shown) or 'nothing'}. Wrap it in a module that returns the embeddings alone."
            )
        return tuple(outputs)


class _Microbatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        outputs = passes.first()
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.passes.again(grads))


def _sum(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Never in place: autograd may hand out one tensor for two parameters."""
    return before if grad is None else grad if before is None else before + grad


# What has rows -------------------------------------------------------------------------------------------------------


def _inner(value: Any) -> Sequence[Any] | None:
    """What a container holds; None of what is no container."""
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else None


def _with_inner(value: Any, inner: Sequence[Any]) -> Any:
    """The same container around other things; mappings become dicts."""
    if isinstance(value, Mapping):
        return dict(zip(value, inner, strict=True))
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


def _has_rows(value: Any) -> bool:
    return (
        value.ndim > 0 if isinstance(value, Tensor) else hasattr(value, "split") and not isinstance(value, str | bytes)
    )


def _leaves(value: Any) -> Iterator[Any]:
    inner = _inner(value)
    if inner is None:
        yield value
    else:
        for each in inner:
            yield from _leaves(each)


def _rows(module: nn.Module, given: Any) -> int:
    """Rows of what a module is given; all that has rows must have as many."""
    counts = {len(each) for each in _leaves(given) if _has_rows(each)}
    if len(counts) != 1:
        found = f"{', '.join(map(str, sorted(counts)))} rows" if counts else "nothing that has rows"
        raise PairsError(
            f"{type(module).__name__} cannot be given some rows at a time: what it takes must have one number of rows, "
            f"the instances, along the first dimension, got {found}. Wrap it in a module that adds the rest by itself."
        )
    return counts.pop()


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    inner = _inner(value)
    return next(leaves) if inner is None else _with_inner(value, [_rebuilt(each, leaves) for each in inner])
