"""Gradient caching: the encoder sees a few rows at a time, the loss sees all of them (Gao et al. 2021).

    dL/dtheta = sum_chunks (d encoder(x_chunk) / dtheta)^T dL/dz_chunk      (Eqs. 6 and 7)

The first pass embeds all chunks without a graph. The loss gives the gradient of the embeddings. The backward pass then
runs the encoder again on each chunk and carries that gradient to the parameters. Both passes draw the same random
numbers. All of this is one node of the autograd graph, so hooks, gradient clipping and DistributedDataParallel see the
gradient of each parameter once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dipole.core.utils.errors import PairsError

Forward = Callable[..., Any]

CHECKPOINT = "_gradient_checkpointing_func"
"""Where layers of transformers hold the function that checkpoints them."""


def microbatched(module: nn.Module, size: int, run: Forward | None = None) -> Forward:
    """Return a forward pass of `module` that computes `size` rows at a time by `run` (use it with `patched_forward`).

    The module takes rows and returns a row for each: tensors, or tuples, lists and dicts of them. Its inputs may also
    be objects with `split(size)` and `len`. Inputs without rows are passed to every chunk. A call raises
    PairsError if inputs or outputs do not have one row for each instance.
    """
    undivided = own_forward(module) if run is None else run

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Other mappings than a dict are leaves of a tree.
        args = tuple(_as_dict(each) for each in args)
        kwargs = {name: _as_dict(each) for name, each in kwargs.items()}
        leaves, spec = tree_flatten((args, kwargs))
        rows = _count_rows(module, leaves)
        if rows <= size:
            return undivided(*args, **kwargs)
        passes = _Passes(module, undivided, leaves, spec, rows, size)
        if torch.is_grad_enabled() and passes.leaves:
            outputs = _Microbatched.apply(passes, *passes.leaves)  # type: ignore[no-untyped-call]
        else:
            outputs = passes.embed()
        return tree_unflatten(outputs, passes.spec)

    return forward


@contextmanager
def patched_forward(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Replace the forward pass of `module` inside the block. Names, weights and hooks stay."""
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


def own_forward(module: nn.Module) -> Forward:
    """Return the current forward pass of a module, compiled if the module is."""
    forward, compiled = module.forward, module._compiled_call_impl
    if compiled is None:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with patched_forward(module, forward):
            return compiled(*args, **kwargs)

    return run


class RngAndBuffers:
    """A copy of the random generators and of a module's buffers, so that a forward pass can be repeated exactly.

    Buffers are what a forward pass changes: running statistics of batch norm, vectors of spectral norm. A `with` block
    begins from the copied state, and restores the state before it at its end. It may be entered again.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._cpu_rng = torch.get_rng_state()
        self._device_rng: Tensor | None = None
        if device.type not in ("cpu", "meta"):
            self._device_rng = torch.get_device_module(device).get_rng_state(*self._place)
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self._outer: list[RngAndBuffers] = []

    @property
    def _place(self) -> tuple[torch.device, ...]:
        return () if self._device.type == "mps" else (self._device,)

    def restore(self) -> None:
        """Go back to the copied state. No graph reads a buffer that a forward pass changes, so autograd is not told."""
        torch.set_rng_state(self._cpu_rng)
        if self._device_rng is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_rng, *self._place)
        for buffer, copy in self._buffers:
            buffer.data.copy_(copy)

    def __enter__(self) -> None:
        self._outer.append(RngAndBuffers(self._module, self._device))
        self.restore()

    def __exit__(self, *_: object) -> None:
        self._outer.pop().restore()


@contextmanager
def _plain_checkpoints(module: nn.Module) -> Iterator[None]:
    """Let transformers checkpoint activations without re-entering autograd, which `torch.autograd.grad` refuses.

    Values and gradients are the same.
    """
    changed = []
    for part in module.modules():
        function = part.__dict__.get(CHECKPOINT)
        if isinstance(function, partial) and function.keywords.get("use_reentrant"):
            changed.append((part, function))
            setattr(part, CHECKPOINT, partial(function, use_reentrant=False))
    try:
        yield
    finally:
        for part, function in changed:
            setattr(part, CHECKPOINT, function)


class _Passes:
    """Both passes of one call."""

    def __init__(
        self, module: nn.Module, run: Forward, inputs: list[Any], tree: TreeSpec, rows: int, size: int
    ) -> None:
        self._module, self._run, self._inputs, self._tree, self._size = module, run, inputs, tree, size
        self._cuts = list(pairwise([*range(0, rows, size), rows]))
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        # Places of the inputs that need a gradient.
        self._wanted = [n for n, each in enumerate(inputs) if isinstance(each, Tensor) and each.requires_grad]
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.leaves = [*self._parameters, *(each for each in tensors if each.requires_grad)]
        device = next((each.device for each in [*module.parameters(), *tensors]), torch.device("cpu"))
        kinds = {kind for kind in ("cpu", device.type) if torch.amp.is_autocast_available(kind)}
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in sorted(kinds)]
        self._start = RngAndBuffers(module, device)
        self.spec: Any = None  # of the outputs

    def embed(self) -> tuple[Tensor, ...]:
        """Return all rows of every output, without a graph."""
        chunks = []
        with torch.no_grad(), self._casting(), _plain_checkpoints(self._module):
            for number, part in enumerate(self._chunks()):
                chunks.append(self._call(number, part))
        return tuple(map(torch.cat, zip(*chunks, strict=True)))

    @contextmanager
    def _casting(self) -> Iterator[None]:
        """Apply the autocast settings of the call. A cached cast without a graph would cut the second gradient."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield

    def gradients(self, output_grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of `leaves`, given those of the outputs."""
        of_parameters: list[Tensor | None] = [None] * len(self._parameters)
        of_inputs: list[list[Tensor]] = [[] for _ in self._wanted]
        with self._start, self._casting(), _plain_checkpoints(self._module):
            for number, part in enumerate(self._chunks()):
                for place in self._wanted:
                    part[place] = part[place].detach().requires_grad_()
                inputs = [part[place] for place in self._wanted]
                found = self._backward(number, part, [*self._parameters, *inputs], output_grads)
                for index, grad in enumerate(found[: len(of_parameters)]):
                    # Never in place: autograd may return one tensor for two parameters.
                    before = of_parameters[index]
                    if before is not None and grad is not None:
                        of_parameters[index] = before + grad
                    elif grad is not None:
                        of_parameters[index] = grad
                for parts, x, grad in zip(of_inputs, inputs, found[len(of_parameters) :], strict=True):
                    parts.append(torch.zeros_like(x) if grad is None else grad)
        return [*of_parameters, *map(torch.cat, of_inputs)]

    def _backward(
        self, number: int, part: list[Any], leaves: list[Tensor], output_grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        start, stop = self._cuts[number]
        with torch.enable_grad():
            outputs = self._call(number, part)
        heads, grads = [], []
        for output, grad in zip(outputs, output_grads, strict=True):
            if grad is not None and output.requires_grad:
                heads.append(output)
                grads.append(grad[start:stop])
        if not heads:
            return [None] * len(leaves)
        return torch.autograd.grad(heads, leaves, grads, allow_unused=True)

    def _chunks(self) -> Iterator[list[Any]]:
        """Yield the leaves of the inputs, `size` rows at a time."""
        split = [each.split(self._size) if _has_rows(each) else [each] * len(self._cuts) for each in self._inputs]
        for number in range(len(self._cuts)):
            yield [parts[number] for parts in split]

    def _call(self, number: int, part: list[Any]) -> tuple[Tensor, ...]:
        args, kwargs = tree_unflatten(part, self._tree)
        start, stop = self._cuts[number]
        try:
            outputs, self.spec = tree_flatten(self._run(*args, **kwargs))
        except ValueError as error:
            if stop - start > 1 or "more than 1 value per channel" not in str(error):
                raise
            raise PairsError(
                f"{type(self._module).__name__} has batch norm, which cannot train on one row, and {self._cuts[-1][1]} "
                f"rows in microbatches of {self._size} leave one. Take another size."
            ) from error
        wrong = [each for each in outputs if not isinstance(each, Tensor) or not each.ndim or len(each) != stop - start]
        if wrong or not outputs:
            shown = [f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in wrong]
            raise PairsError(
                f"{type(self._module).__name__} was given {stop - start} rows and must return tensors with a row for "
                f"each; got {', '.join(shown) or 'nothing'}. Wrap it in a module that returns only the embeddings."
            )
        return tuple(outputs)


class _Microbatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        outputs = passes.embed()
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.passes.gradients(grads))


def _has_rows(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0
    return hasattr(value, "split") and not isinstance(value, str | bytes)


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _count_rows(module: nn.Module, leaves: list[Any]) -> int:
    counts = {len(each) for each in leaves if _has_rows(each)}
    if len(counts) != 1:
        found = "nothing that has rows"
        if counts:
            found = f"{', '.join(map(str, sorted(counts)))} rows"
        raise PairsError(
            f"{type(module).__name__} cannot be called in microbatches: all its inputs must have one number of rows, "
            f"the instances, along the first dimension; got {found}. Wrap it in a module that adds the other inputs."
        )
    return counts.pop()
