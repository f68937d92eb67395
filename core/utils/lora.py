"""Low-rank adapters in a pre-trained network (Hu et al. 2022), by peft: W x + (alpha / rank) B A x, W fixed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import needing
from dipole.core.utils.freezing import fix_batch_norm, layers


def add_lora(
    model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[str] | None, setting: str
) -> None:
    """Add adapters to layers of a network in place. Only the adapters are trained.

    B starts at 0, so the output does not change. Batch norm keeps its statistics. `targets` are ends of names of the
    layers to adapt, such as "query". None adapts every linear map of the network's layers, or every convolution if
    there is none. Raise ConfigError if peft is not installed, or no layer has such a name.
    """
    with needing("lora", f"{setting} (low-rank adapters)"):
        from peft import LoraConfig, inject_adapter_in_model
    chosen = _targets(model) if targets is None else _named(model, targets, setting)
    if not chosen:
        raise ConfigError(f"{setting}: {type(model).__name__} has no linear map or convolution to adapt.")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=chosen)  # type: ignore[arg-type]
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        found = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{setting}: these layers cannot be adapted: {found}. Choose other targets.") from error
    fix_batch_norm(model)


def merged(module: nn.Module) -> nn.Module:
    """Return a copy with the adapters merged into the weights, or the module itself without adapters.

    Names and shapes are those before `add_lora`.
    """
    if not any(map(_is_adapted, module.modules())):
        return module
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_adapted(child):
                layer: Any = child
                layer.merge()
                setattr(parent, name, layer.get_base_layer())
    return module


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "get_base_layer")


def _adaptable(model: nn.Module) -> dict[str, nn.Module]:
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)}


def _targets(model: nn.Module) -> list[str]:
    inside = {each for block in layers(model).blocks for each in block.modules()}
    found = {name: each for name, each in _adaptable(model).items() if each in inside}
    linear = [name for name, each in found.items() if isinstance(each, nn.Linear)]
    return linear or [name for name, each in found.items() if isinstance(each, nn.Conv2d) and each.groups == 1]


def _named(model: nn.Module, targets: Sequence[str], setting: str) -> list[str]:
    known = _adaptable(model)
    found = []
    for target in targets:
        named = [name for name in known if name == target or name.endswith(f".{target}")]
        if not named:
            ends = sorted({name.rpartition(".")[2] for name in known} - {""})
            raise ConfigError(
                f"{setting}.targets: {type(model).__name__} has no linear map or convolution called {target!r}. "
                f"Allowed: {', '.join(ends)}, or longer ends of their names."
            )
        found += named
    return list(dict.fromkeys(found))
