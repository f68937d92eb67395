"""One forward pass as one module: embed a batch, pair the rows of all ranks, evaluate the objective."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.contrast.gather import Related
from dipole.core.contrast.objective import Composite, Outcome
from dipole.core.train.adapter import Adapter


class Opaque:
    """Carries a batch through Fabric and DDP, which would otherwise walk over it and cast its tensors."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Step(nn.Module):
    """Encoder and objective as one module, so that DDP sees one forward pass and all parameters."""

    def __init__(self, adapter: Adapter, objective: Composite, mixed: bool) -> None:
        super().__init__()
        self.module = adapter.module
        self.objective = objective
        self._adapter = adapter
        self._mixed = mixed
        self._taken: tuple[Outcome, Related] | None = None

    def forward(self, batch: Opaque) -> Tensor:
        related = self.objective.relate(self._adapter.embed(batch.value))
        # The similarity matrix is where half precision would cost accuracy; the engine widens its inputs itself.
        with torch.autocast(related.pairs[0].anchors.device.type, enabled=False) if self._mixed else nullcontext():
            outcome: Outcome = self.objective(related)
        self._taken = outcome, related
        return outcome.loss

    def taken(self) -> tuple[Outcome, Related]:
        """Hand over the last outcome, keeping no reference to its tensors."""
        assert self._taken is not None
        taken, self._taken = self._taken, None
        return taken
