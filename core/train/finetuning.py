"""Settings for fine-tuning a pre-trained network, shared by all domains: freezing and LoRA."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.freezing import freeze
from dipole.core.utils.lora import add_lora

FreezeSetting = Literal["none", "backbone"] | Annotated[int, Field(ge=1)]
FREEZE_HELP = (
    "what of a model of transformers learns nothing and stays in evaluation mode: none, backbone (all of it), or so "
    "many of its first layers or stages with what embeds before them"
)
WEIGHTS_HELP = "of a model of transformers; default: pretrained where there are weights, else random"
LORA_HELP = "low-rank adapters learn instead of the weights of a model of transformers (extra: lora)"


class LoraTable(Settings):
    """Low-rank adapters: rank, alpha, dropout, targets."""

    rank: int = Field(8, ge=1, description="of the adapters")
    alpha: float = Field(16.0, gt=0, description="their share is alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into them")
    targets: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="ends of names of the layers they stand beside, such as [query, value]; default: every linear map "
        "of the model's layers, or every convolution where there is none",
    )


def fine_tune(model: nn.Module, how: Literal["none", "backbone"] | int, lora: LoraTable | None, table: str) -> None:
    """Freeze a part of a network and add LoRA adapters to the rest. `table` is the recipe's, such as "vision.encoder".

    Raise ConfigError if it has fewer layers or none of such names, nothing is left to adapt, or peft is missing.
    """
    if lora is not None:
        add_lora(model, lora.rank, lora.alpha, lora.dropout, lora.targets, f"{table}.lora")
    freeze(model, how, f"{table}.freeze")
    if lora is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{table}.freeze: {how!r} leaves the adapters of {table}.lora nothing to learn. Leave freeze out, as lora "
            "fixes the model's own weights by itself; or freeze fewer layers."
        )
