"""Fine-tuning of a pre-trained network, shared by all domains: freezing, and low-rank adapters.

Adapters (LoRA, Hu et al. 2022) are those of peft: W x + (alpha / rank) B A x, W fixed.
"""

import copy
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import needing
from dipole.core.utils.freezing import fix_batch_norm, freeze, layers

FreezeSetting = Literal["none", "backbone"] | Annotated[int, Field(ge=1)]
FREEZE_HELP = (
    "what of a model of transformers learns nothing and stays in evaluation mode: none, backbone (all of it), or so "
    "many of its first layers or stages with what embeds before them"
)
WEIGHTS_HELP = "of a model of transformers (default: pretrained where there are weights, else random)"
LORA_HELP = "low-rank adapters learn instead of the weights of a model of transformers (extra: lora)"


class LoraTable(Settings):
    """Low-rank adapters: rank, alpha, dropout, targets."""

    rank: int = Field(8, ge=1, description="of the adapters")
    alpha: float = Field(16.0, gt=0, description="their share is alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into them")
    targets: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="ends of names of the layers to adapt, such as [query, value] (default every linear map of the "
        "model's layers, or every convolution where there is none)",
    )


def fine_tune(model: nn.Module, how: Literal["none", "backbone"] | int, lora: LoraTable | None, table: str) -> None:
    """Freeze a part of a network and add LoRA adapters to the rest. `table` is the recipe's, such as "vision.encoder".

    Raise ConfigError if it has fewer layers or none of such names, nothing is left to adapt, or peft is missing.
    """
    if lora is not None:
        _add_lora(model, lora, f"{table}.lora")
    freeze(model, how, f"{table}.freeze")
    if lora is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{table}.freeze: {how!r} leaves the adapters of {table}.lora nothing to learn. Leave freeze out, as lora "
            "fixes the model's own weights by itself, or freeze fewer layers."
        )


def _add_lora(model: nn.Module, lora: LoraTable, setting: str) -> None:
    """Add adapters in place. Only they are trained. B starts at 0, so the output does not change."""
    with needing("lora", f"{setting} (low-rank adapters)"):
        from peft import LoraConfig, inject_adapter_in_model
    chosen = _chosen(model, lora.targets, setting)
    if not chosen:
        raise ConfigError(f"{setting}: {type(model).__name__} has no linear map or convolution to adapt.")
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=chosen)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        found = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{setting}: these layers cannot be adapted: {found}. Choose other targets.") from error
    fix_batch_norm(model)


def merged(module: nn.Module) -> nn.Module:
    """Return a copy with the adapters merged into the weights, named as before, or the module itself without any."""
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


def _chosen(model: nn.Module, targets: Sequence[str] | None, setting: str) -> list[str]:
    """Return the named layers, by default every linear map of the model's blocks, or every convolution without any."""
    known = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)}
    if targets is None:
        blocks = {each for block in layers(model).blocks for each in block.modules()}
        inside = {name: each for name, each in known.items() if each in blocks}
        linear = [name for name, each in inside.items() if isinstance(each, nn.Linear)]
        return linear or [name for name, each in inside.items() if isinstance(each, nn.Conv2d) and each.groups == 1]
    found: dict[str, None] = {}
    for target in targets:
        named = [name for name in known if name == target or name.endswith(f".{target}")]
        if not named:
            ends = sorted({name.rpartition(".")[2] for name in known} - {""})
            raise ConfigError(
                f"{setting}.targets: {type(model).__name__} has no linear map or convolution called {target!r}. "
                f"Allowed: {', '.join(ends)}, or longer ends of their names."
            )
        found |= dict.fromkeys(named)
    return list(found)
