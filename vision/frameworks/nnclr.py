"""NNCLR: the nearest neighbour of a view in a set of past embeddings stands for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from dipole.vision.frameworks.base import Batch, Build, register_framework
from dipole.vision.frameworks.predictor import Predicting, PredictorConfig
from dipole.vision.frameworks.queue import Queue, of_all_ranks
from dipole.vision.heads import Norm


class NNCLRConfig(PredictorConfig):
    """The [vision.nnclr] table."""

    support: int = Field(98_304, ge=1, description="past embeddings among which a nearest neighbour is looked for, |Q|")


@register_framework("nnclr")
class NNCLR(Predicting):
    """Dwibedi et al. 2021, Eqs. 3-4: NN(z, Q) of a view finds the prediction of the image's other view.

    The anchor is the neighbour, without gradient; its positives are the predictions of the other views, and those of
    the other images' other views repel. The first view's projections enter Q after the step, of all ranks; Q starts
    with random unit vectors. The projector has three layers and batch norm behind all where nothing else is set.
    """

    table = NNCLRConfig
    projector = (3, "all")
    called = "nnclr"

    def __init__(self, build: Build, channels: int, tap: str | None, hidden: int, norm: Norm, support: int) -> None:
        super().__init__(build, channels, tap, hidden, norm)
        self.queue = Queue(support, self.embedding_dim)
        self._fresh: Tensor | None = None

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        self._fresh = projected[0].detach()
        support = self.queue.get_buffer("rows").to(projected[0].dtype)
        return [nearest_in(support, z.detach()) for z in projected], [self.predictor(z) for z in projected]

    @torch.no_grad()
    def after_step(self) -> None:
        if self._fresh is not None:
            self.queue.push(*of_all_ranks(self._fresh))
            self._fresh = None


@torch.no_grad()
def nearest_in(support: Tensor, z: Tensor) -> Tensor:
    """The row of support (Q, d), of unit length, that has the largest cosine with each z (n, d)."""
    return support[(F.normalize(z, dim=1) @ support.T).argmax(1)]
