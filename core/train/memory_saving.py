"""Run the encoders of a training step in microbatches, with activation checkpointing, or compiled."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dipole.core.train.config import GRAPHED, CompileMode, TrainConfig
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.microbatch import RngAndBuffers, microbatched, own_forward, patched_forward

Forward = Callable[..., Any]


class PatchedEncoders:
    """Replace the forward passes of `Adapter.encoders` inside `with encoding():`.

    Outside the block (evaluation, export, saved weights, copies) the modules are as the domain built them.
    """

    def __init__(self, encoders: Iterable[nn.Module], config: TrainConfig, compiles: bool) -> None:
        self._forwards: list[tuple[nn.Module, Forward]] = []
        self._asked = [name for name in ("microbatch", "activation_checkpointing") if getattr(config, name)]
        if compiles:
            self._asked.append("compile")
        self._was_used = False
        mode: CompileMode = "default"
        if not isinstance(config.compile, bool):
            mode = config.compile
        self._graphed = compiles and mode in GRAPHED
        maybe_compile: Callable[[Forward], Forward] = lambda forward: forward  # noqa: E731
        if compiles:
            from torch._functorch import config as functorch

            functorch.donated_buffer = False  # health.gradient_lengths runs the backward pass more than once
            from torch._inductor import list_mode_options

            # torch.compile takes a mode or options, not both. A second pass repeats the random numbers of the first.
            maybe_compile = partial(torch.compile, options={**list_mode_options(mode), "fallback_random": True})
        for encoder in encoders if self._asked else ():
            forward = own_forward(encoder)
            if config.activation_checkpointing:
                forward = checkpointed(encoder, forward, maybe_compile)
            else:
                forward = maybe_compile(forward)
            if config.microbatch is not None:
                forward = microbatched(encoder, config.microbatch, forward)
            self._forwards.append((encoder, self._noting(forward)))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a block in which the encoders are called."""
        if self._graphed:
            torch.compiler.cudagraph_mark_step_begin()
        with ExitStack() as stack:
            for encoder, forward in self._forwards:
                stack.enter_context(patched_forward(encoder, forward))
            yield
        if self._asked and not self._was_used:
            raise ConfigError(
                f"train.{self._asked[0]}: has no effect in this domain, as its embed calls none of the modules that "
                "Adapter.encoders names. Leave it out, or let encoders return those that embed calls."
            )

    def _noting(self, forward: Forward) -> Forward:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._was_used = True
            return forward(*args, **kwargs)

        return noted


def checkpointed(encoder: nn.Module, forward: Forward, maybe_compile: Callable[[Forward], Forward]) -> Forward:
    """Return a forward pass that stores only the inputs of its segments and computes the rest again (Chen et al. 2016).

    Random numbers and buffers are replayed, so values, gradients and running statistics stay the same, bit for bit.
    """
    parts = segments(encoder)
    if parts == [encoder]:
        return _recomputed(encoder, forward, maybe_compile)
    replaced = [(part, _recomputed(part, own_forward(part), maybe_compile)) for part in parts]

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for part, recomputed in replaced:
                stack.enter_context(patched_forward(part, recomputed))
            return forward(*args, **kwargs)

    return run


def segments(encoder: nn.Module) -> list[nn.Module]:
    """Return the modules to checkpoint one by one: blocks in lists of blocks, and chains of layers.

    A block that holds only blocks (a stage of a ResNet) is replaced by them. An encoder with neither is one segment.
    """
    return _pieces(encoder) or [encoder]


def _pieces(module: nn.Module, deep: bool = True) -> list[nn.Module]:
    if isinstance(module, nn.Sequential) and not all(
        _is_block(layer) for layer in _flat(module) if any(True for _ in layer.parameters())
    ):
        return [module]
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return [piece for child in module.children() for piece in _pieces(child, deep)]
    found: list[nn.Module] = []
    for child in module.children():
        inner = _pieces(child, deep=False) if deep else []
        covered = {id(p) for piece in inner for p in piece.parameters()}
        if inner and all(id(p) in covered for p in child.parameters()):
            found += inner
        elif _is_block(child):
            found.append(child)
    return found


def _is_block(module: nn.Module) -> bool:
    """Return whether a module consists of other modules. A reparametrised layer does not."""
    return any(name != "parametrizations" for name, _ in module.named_children())


def _recomputed(module: nn.Module, forward: Forward, maybe_compile: Callable[[Forward], Forward]) -> Forward:
    if not isinstance(module, nn.Sequential):
        return _checkpoint(module, forward, maybe_compile)
    pieces = [_checkpoint(piece, piece.forward, maybe_compile) for piece in _cut(module)]
    return lambda x: reduce(lambda value, piece: piece(value), pieces, x)


def _checkpoint(module: nn.Module, forward: Forward, maybe_compile: Callable[[Forward], Forward]) -> Forward:
    device = next(chain(module.parameters(), module.buffers()), torch.empty(0)).device
    compiled = maybe_compile(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        began = RngAndBuffers(module, device)
        return checkpoint(
            compiled,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), began),
            **kwargs,
        )

    return run


def _cut(layers: nn.Sequential) -> list[nn.Sequential]:
    """Split a chain of n layers into about sqrt(n) pieces. An in-place layer stays with the layer before it."""
    flat = list(_flat(layers))
    size = math.isqrt(len(flat) - 1) + 1
    free = [place for place, layer in enumerate(flat) if not getattr(layer, "inplace", False)]
    cuts = [0]
    for place in free:
        if place >= cuts[-1] + size:
            cuts.append(place)
    return [nn.Sequential(*flat[start:end]) for start, end in pairwise([*cuts, len(flat)])]


def _flat(layers: nn.Sequential) -> Iterator[nn.Module]:
    for layer in layers:
        if type(layer) is nn.Sequential:
            yield from _flat(layer)
        else:
            yield layer


def compiler_problem(device: torch.device) -> str:
    """Return in one line why torch.compile fails on a device. Empty if it works."""
    try:
        torch.compile(torch.square, fullgraph=True)(torch.ones(2, device=device))
    except Exception as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
