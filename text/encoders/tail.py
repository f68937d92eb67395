"""The modules that sentence-transformers puts behind a transformer: pooling, dense layers, normalisation.

An exported folder may hold a copy of this file: it imports torch, its neighbours, and nothing else of dipole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Chunk
from .networks import Encoder, pooled

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


class Dense(nn.Module):
    """A linear map with an activation, with a residual connection if `residual` is True."""

    def __init__(self, size: int, out: int, bias: bool, activation: str, residual: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=bias)
        self.activation = getattr(nn, activation)()
        self.residual = None
        if residual and size != out:
            self.residual = nn.Linear(size, out, bias=False)
        self.adds = residual

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.activation(self.linear(x))
        if not self.adds:
            return found
        if self.residual is None:
            return found + x
        return found + self.residual(x)


class Unit(nn.Module):
    """Scales to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x)


def layer(a: Mapping[str, Any]) -> nn.Module:
    """A layer of `Pooled`, with weights to be loaded, from its description."""
    match a["kind"]:
        case "dense":
            return Dense(a["size"], a["out"], a["bias"], a["activation"], a["residual"])
        case "layer_norm":
            return nn.LayerNorm(a["size"])
        case "dropout":
            return nn.Dropout(a["p"])
        case "normalize":
            return Unit()
    raise ValueError(f"unknown layer {a['kind']!r}")


class Pooled(Encoder):
    """A transformer whose tokens are pooled in one or several ways, side by side, and passed through layers.

    `pooling` are names in `POOLING`, `layers` descriptions as `layer` reads them. The transformer's own pooling is
    not used.
    """

    described: Mapping[str, Any] | None = None  # as of a `Transformer`
    remarks: Sequence[str] = ()

    def __init__(self, part: Encoder, pooling: Sequence[str], layers: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.part: Any = part
        self.pooling, self.described_layers = tuple(pooling), [dict(each) for each in layers]
        self.layers = nn.Sequential(*map(layer, layers))
        self.width = part.width * len(self.pooling)
        for each in layers:
            self.width = int(each.get("out", self.width))

    def forward(self, chunk: Chunk) -> Tensor:
        mask = chunk.mask()
        hidden = self.part.model(input_ids=chunk.ids, attention_mask=mask.long()).last_hidden_state
        found: Tensor = self.layers(torch.cat([pooled(hidden, mask, mode) for mode in self.pooling], 1))
        return found
