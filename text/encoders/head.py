"""SimCSE's head over the pooled output: h -> tanh(W h + b) (Gao et al. 2021, Section 3)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dipole.text.encoders.batch import Chunk
from dipole.text.encoders.networks import Part, SentenceModel
from dipole.text.encoders.tail import Pooled


class Headed(Part):
    """An encoder with a head of its own width. Evaluation keeps it if it `stays` (supervised SimCSE)."""

    described: Mapping[str, Any] | None = None  # as of a `Transformer`
    remarks: Sequence[str] = ()

    def __init__(self, part: Part, stays: bool) -> None:
        super().__init__()
        self.part, self.stays, self.width = part, stays, part.width
        self.linear = nn.Linear(part.width, part.width)
        self.described, self.remarks = getattr(part, "described", None), getattr(part, "remarks", ())

    def forward(self, chunk: Chunk) -> Tensor:
        found: Tensor = self.part(chunk)
        if self.training or self.stays:
            return torch.tanh(self.linear(found))
        return found

    def evaluated(self) -> Part:
        """The encoder as it is in evaluation, of parts that sentence-transformers has too."""
        if not self.stays:
            return self.part
        part: Any = self.part
        before: list[dict[str, Any]] = []
        pooling: Sequence[str] = (getattr(part, "pooling", "mean"),)
        if isinstance(part, Pooled):
            part, before, pooling = part.part, part.described_layers, part.pooling
        size = self.width
        dense = {"kind": "dense", "size": size, "out": size, "bias": True, "activation": "Tanh", "residual": False}
        found = Pooled(part, pooling, [*before, dense])
        for number, layer in enumerate(getattr(self.part, "layers", ())):
            found.layers[number].load_state_dict(layer.state_dict())
        found.layers[-1].linear.load_state_dict(self.linear.state_dict())  # type: ignore[union-attr]
        found.described, found.remarks = self.described, self.remarks
        return found.to(self.linear.weight.device).train(self.training)


def with_head(part: Part, head: Literal["none", "mlp", "mlp_only_train"]) -> Part:
    """Return the encoder with a newly initialised head, or unchanged without a head."""
    if head == "none":
        return part
    return Headed(part, stays=head == "mlp")


def evaluated(model: SentenceModel) -> SentenceModel:
    """Return the model for evaluation and export, without its head unless the head stays."""
    if not isinstance(model.f, Headed):
        return model
    sides: Any = model.sides()
    return SentenceModel(*(side.evaluated() for side in sides), dropout=model.dropout).train(model.training)
