"""Gradient caching: the encoder sees a few rows at a time, the loss sees all of them (Gao et al. 2021).

    dL/dtheta = sum_chunks (d encoder(x_chunk) / dtheta)^T dL/dz_chunk      (Eqs. 6 and 7)

Each chunk is a checkpoint of PyTorch: the forward pass keeps no activations, and the backward pass, which begins with
the gradients of all embeddings, computes one chunk after the other again. Both passes draw the same random numbers. It
is one graph, so hooks, gradient clipping and DistributedDataParallel see the gradient of each parameter once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dipole.core.utils.errors import PairsError

Forward = Callable[..., Any]


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
        tensors = [each for each in [*module.parameters(), *leaves] if isinstance(each, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        sizes = [min(size, rows - start) for start in range(0, rows, size)]
        split = [each.split(size) if _has_rows(each) else [each] * len(sizes) for each in leaves]
        began: RngAndBuffers | None = None
        chunks, tree = [], spec
        for count, *part in zip(sizes, *split, strict=True):
            args, kwargs = tree_unflatten(part, spec)
            began = RngAndBuffers(module, device, began)
            try:
                outputs, tree = tree_flatten(recomputed(undivided, began, *args, **kwargs))
            except ValueError as error:
                if count > 1 or "more than 1 value per channel" not in str(error):
                    raise
                raise PairsError(
                    f"{type(module).__name__} has batch norm, which cannot train on one row, and {rows} rows in "
                    f"microbatches of {size} leave one. Take another size."
                ) from error
            _check_outputs(module, outputs, count)
            chunks.append(outputs)
        return tree_unflatten([torch.cat(parts) for parts in zip(*chunks, strict=True)], tree)

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

    A forward pass changes buffers such as running statistics of batch norm. A `with` block begins from the copied state
    and restores the state before it at its end.
    """

    def __init__(self, module: nn.Module, device: torch.device, before: RngAndBuffers | None = None) -> None:
        self._module, self._device = module, device
        self._cpu_rng = torch.get_rng_state()
        self._device_rng: Tensor | None = None
        if device.type not in ("cpu", "meta"):
            self._device_rng = torch.get_device_module(device).get_rng_state(*self._place)
        # A buffer that has not changed since `before` is not copied again.
        known = {} if before is None else {(id(buffer), version): copy for buffer, version, copy in before._buffers}
        self._buffers: list[tuple[Tensor, int, Tensor]] = []
        for buffer in module.buffers():
            copy = known.get((id(buffer), buffer._version))
            self._buffers.append((buffer, buffer._version, buffer.clone() if copy is None else copy))
        self._outer: list[RngAndBuffers] = []

    @property
    def _place(self) -> tuple[torch.device, ...]:
        return () if self._device.type == "mps" else (self._device,)

    def restore(self) -> None:
        """Go back to the copied state. No graph reads a buffer that a forward pass changes, so autograd is not told."""
        torch.set_rng_state(self._cpu_rng)
        if self._device_rng is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_rng, *self._place)
        for buffer, _, copy in self._buffers:
            buffer.data.copy_(copy)

    def __enter__(self) -> None:
        self._outer.append(RngAndBuffers(self._module, self._device))
        self.restore()

    def __exit__(self, *_: object) -> None:
        self._outer.pop().restore()


def recomputed(run: Forward, began: RngAndBuffers, *args: Any, **kwargs: Any) -> Any:
    """Compute without keeping activations. The backward pass computes it again from the state in which it `began`."""
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    again: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": lambda: (nullcontext(), began),
    }
    return checkpoint(run, *args, **again, **kwargs)


def _check_outputs(module: nn.Module, outputs: list[Any], rows: int) -> None:
    wrong = [each for each in outputs if not isinstance(each, Tensor) or not each.ndim or len(each) != rows]
    if wrong or not outputs:
        shown = [f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in wrong]
        raise PairsError(
            f"{type(module).__name__} was given {rows} rows and must return tensors with a row for each; got "
            f"{', '.join(shown) or 'nothing'}. Wrap it in a module that returns only the embeddings."
        )


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
