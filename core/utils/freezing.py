"""Freeze a backbone or its first layers, and set the mode of modules for the length of a block.

Frozen parameters have no gradient, so optimizers keep no state for them and do not decay them. Frozen modules stay in
evaluation mode: batch norm keeps its pretrained statistics, dropout and stochastic depth are off.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from dipole.core.utils.errors import ConfigError, TrainingError

Freeze = Literal["none", "backbone"] | int


class Layers(NamedTuple):
    """A network as a chain: its layers (or stages) in order, and the modules before the first layer.

    `loose` are parameters that belong to no such module (class tokens, positions).
    """

    blocks: list[nn.Module]
    before: list[nn.Module]
    loose: list[nn.Parameter]


def freeze(model: nn.Module, how: Freeze, setting: str) -> None:
    """Freeze a part of a network: "none", "backbone", or its first layers or stages with the modules before them."""
    if how == "backbone":
        fix(model)
    elif how != "none":
        chain = layers(model)
        count = len(chain.blocks)
        if not 1 <= how <= count:
            allowed = f"1 to {count}, or " if count else ""
            raise ConfigError(
                f"{setting}: {how} layers cannot be frozen, {type(model).__name__} has {count}. Allowed: {allowed}"
                "'backbone' for all of it, 'none'."
            )
        for part in (*chain.before, *chain.blocks[:how]):
            fix(part)
        for parameter in chain.loose:
            parameter.requires_grad_(False)


def fix(module: nn.Module) -> None:
    """Freeze a module: no gradient, and evaluation mode even if its parent trains."""
    module.requires_grad_(False)
    # A bound method is copied with its module: the momentum copy of a network is frozen where the network is.
    module.__dict__["train"] = MethodType(_stays, module)
    module.eval()


def _stays(self: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(self, False)


_stays.__name__ = "train"  # under this name a bound method is pickled


def fix_unused(model: nn.Module, features: Tensor) -> list[str]:
    """Freeze the parameters that features (with their graph) do not depend on and return their names.

    An unused head gets no gradient. With several ranks a missing gradient is an error, so the head must be frozen.
    """
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not named or not features.requires_grad:
        return []
    grads = torch.autograd.grad(features.sum(), list(named.values()), allow_unused=True)
    unused = [name for name, grad in zip(named, grads, strict=True) if grad is None]
    for name in unused:
        named[name].requires_grad_(False)
    return unused


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the numbers of all and of frozen parameters, for the record."""
    sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
    return {"parameters": sum(size for size, _ in sizes), "frozen": sum(size for size, learns in sizes if not learns)}


def fix_batch_norm(model: nn.Module) -> None:
    """Freeze every batch norm whose parameters do not learn, statistics included."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not any(
            each.requires_grad for each in module.parameters()
        ):
            fix(module)


def layers(model: nn.Module) -> Layers:
    """Return the layers of a network: the module list with most parameters, on a tie the outermost one.

    Stages with numbered names (layer1, layer2, ...) count as a list.
    """
    best, size = None, 0
    for path, blocks in _lists(model, ()):
        held = sum(p.numel() for p in {p for block in blocks for p in block.parameters()})
        if held > size:
            best, size = (path, blocks), held
    if best is None:
        return Layers([], [], [])
    path, blocks = best
    before: list[nn.Module] = []
    loose: list[nn.Parameter] = []
    module = model
    for name in path:
        loose += module.parameters(recurse=False)
        for other, child in module.named_children():
            if other == name:
                break
            before.append(child)
        module = module.get_submodule(name)
    return Layers(blocks, before, loose)


def _lists(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[nn.Module]]]:
    """Yield (names on the way to the first layer, layers) of every module list below a module, outer lists first."""
    children = list(module.named_children())
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        yield path, [child for _, child in children if any(True for _ in child.parameters())]
    numbered: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, child in children:
        if (match := re.fullmatch(r"(.*\D)\d+", name)) and isinstance(child, nn.Sequential):
            numbered.setdefault(match[1], []).append((name, child))
    for stages in numbered.values():
        if len(stages) > 1:
            yield (*path, stages[0][0]), [stage for _, stage in stages]
    for name, child in children:
        yield from _lists(child, (*path, name))


@contextmanager
def in_mode(is_training: bool, *modules: nn.Module | None) -> Iterator[None]:
    """Set the mode of modules, and restore that of each submodule at the end of the block."""
    there = [module for module in modules if module is not None]
    modes = [(part, part.training) for module in there for part in module.modules()]
    for module in there:
        module.train(is_training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def state_hash(module: nn.Module) -> str:
    """Return the sha256 of names, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            value = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def frozen(module: nn.Module) -> Iterator[str]:
    """Set evaluation mode without gradients, yield the module's hash, and restore the mode of every submodule.

    Raises TrainingError if a parameter or buffer changed inside the block.
    """
    before = state_hash(module)
    with in_mode(False, module):
        with torch.no_grad():
            yield before
        if state_hash(module) != before:
            raise TrainingError("the encoder changed while it was evaluated: its parameters or buffers are not frozen")
