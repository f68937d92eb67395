"""The modules that sentence-transformers puts behind a transformer: pooling, dense layers, normalisation.

An exported folder may hold a copy of this file: it imports torch, its neighbours, and nothing else of dipole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batch import Chunk
from .networks import Part

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled(hidden: Tensor, mask: Tensor, mode: str) -> Tensor:
    """States (b, T, d) of tokens, True in mask (b, T) and first in their row, as one vector each, (b, d)."""
    weight = mask.to(hidden.dtype)
    match mode:
        case "cls":
            return hidden[:, 0]
        case "max":
            return hidden.masked_fill(~mask[..., None], -torch.inf).amax(1)
        case "lasttoken":
            last = mask.sum(1) - 1
            return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        case "mean_sqrt_len_tokens":
            return torch.bmm(weight[:, None], hidden)[:, 0] / weight.sum(1, keepdim=True).sqrt()
        case "weightedmean":
            weight = weight * torch.arange(1, weight.shape[1] + 1, device=weight.device)
    return torch.bmm(weight[:, None], hidden)[:, 0] / weight.sum(1, keepdim=True)


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


class Pooled(Part):
    """A transformer whose tokens are pooled in one or several ways, side by side, and passed through layers.

    `pooling` are names in `POOLING`, `layers` descriptions as `layer` reads them. The transformer's own pooling is
    not used.
    """

    described: Mapping[str, Any] | None = None  # as of a `Transformer`
    remarks: Sequence[str] = ()

    def __init__(self, part: Part, pooling: Sequence[str], layers: Sequence[Mapping[str, Any]]) -> None:
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
