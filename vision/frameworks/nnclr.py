"""NNCLR: the nearest neighbour of a view among past embeddings replaces it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dipole.vision.frameworks.base import AnyObjective, Batch, register_framework
from dipole.vision.frameworks.predictor import Predicting, PredictorConfig
from dipole.vision.frameworks.queue import Queue, of_all_ranks


class NNCLRConfig(PredictorConfig):
    """The [vision.nnclr] table."""

    support: int = Field(98_304, ge=1, description="past embeddings to search for the nearest neighbour, |Q|")


@register_framework("nnclr")
class NNCLR(Predicting):
    """Dwibedi et al. 2021, Eqs. 3-4: NN(z, Q) of a view against the predictions of the image's other views.

    The anchor is the neighbour, without gradient. Its positives are the predictions of the other views, its negatives
    those of the other images. The first view's projections, of all ranks, enter Q after the step. Q starts with random
    unit vectors. By default the projector has three layers and batch norm after each.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = NNCLR(backbone, support=4096)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])
        >>> loss.backward()  # then optimizer.step()
        >>> model.after_step()  # fills Q

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        predictor: from embeddings (n, d) to (n, d). None is the paper's (`prediction_head`).
        support: past embeddings, |Q|.
    """

    table = NNCLRConfig
    projector = (3, "all")
    head_name = "nnclr"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = "infonce(temperature=0.1)",
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
        support: int = 98_304,
    ) -> None:
        super().__init__(backbone, objective, head, predictor)
        self.queue = Queue(support, self.embedding_dim)
        self._fresh: Tensor | None = None

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        self._fresh = projected[0].detach()
        support = self.queue.all(projected[0].dtype)
        return [nearest_in(support, z.detach()) for z in projected], [self.predictor(z) for z in projected]

    def update(self) -> None:
        if self._fresh is not None:
            self.queue.push(*of_all_ranks(self._fresh))
            self._fresh = None


@torch.no_grad()
def nearest_in(support: Tensor, z: Tensor) -> Tensor:
    """Return the row of support (Q, d), of unit length, with the largest cosine to each z (n, d)."""
    return support[(F.normalize(z, dim=1) @ support.T).argmax(1)]
