"""The forward pass of training as one module: embed a batch, pair the rows of all ranks, compute the objective."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.objectives.gather import GlobalPairs, all_gather_pairs
from dipole.core.objectives.objective import Composite, Outcome
from dipole.core.train.adapter import Adapter
from dipole.core.train.memory_saving import Encoding

HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of autocast around the encoder, by train.precision."""


class NoScatter:
    """Hide a batch from DistributedDataParallel, which would otherwise scatter and cast its tensors."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class LossModule(nn.Module):
    """Encoder and objective in one module, so that DistributedDataParallel sees one forward pass."""

    def __init__(self, adapter: Adapter, objective: Composite, encoding: Encoding, precision: str) -> None:
        super().__init__()
        self.module = adapter.module
        self.objective = objective
        self._adapter = adapter
        self._encoding = encoding
        self._half = HALF.get(precision)
        self._taken: tuple[Outcome, GlobalPairs] | None = None

    def forward(self, batch: NoScatter) -> Tensor:
        with self._autocast(), self._encoding():
            related = all_gather_pairs(self._adapter.embed(batch.value))
        # The similarity matrix is where half precision would cost accuracy; the engine widens its inputs itself.
        outcome: Outcome = self.objective(related)
        self._taken = outcome, related
        return outcome.loss

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._half is None else torch.autocast(self._adapter.device.type, self._half)

    def pop_outcome(self) -> tuple[Outcome, GlobalPairs]:
        """Return the last outcome and its pairs, and keep no reference to their tensors."""
        assert self._taken is not None
        taken, self._taken = self._taken, None
        return taken
