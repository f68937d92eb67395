"""The base of SimSiam, BYOL, MoCo v3 and NNCLR: a predictor after the projector, and a stopped gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.train.config import Settings
from dipole.core.utils.distributed import all_sum, world_size
from dipole.vision.encoders.base import Norm, mlp
from dipole.vision.frameworks.base import AnyObjective, AnyPairs, Batch, OneBranch, Rows, Setup, embedded
from dipole.vision.frameworks.moco import every_view_in_turn
from dipole.vision.heads import Prediction, prediction_head
from dipole.vision.settings import VisionSettings


class PredictorConfig(Settings):
    """The common settings of frameworks with a predictor."""

    predictor_hidden: int | None = Field(
        None, ge=1, description="hidden units of the predictor; default encoder.hidden, or encoder.dim"
    )
    predictor_norm: Norm = Field("hidden", description="batch norm in the predictor: after no layer, the hidden, all")


class Predicting(OneBranch):
    """Every view in turn is compared with the image's other views; one of the two sides gets no gradient.

    There is one pass of the branch per view, as in the references. The predictor sees the whole batch of a rank,
    whatever the microbatch.

    Args:
        backbone, objective, head: as in `OneBranch`.
        predictor: from embeddings (n, d) to (n, d). None is the paper's (`prediction_head`).
    """

    table = PredictorConfig
    without_negatives = "the other images of the batch are negatives if the objective has some"
    head_name: ClassVar[Prediction] = "byol"

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None = None,
        head: nn.Module | None = None,
        predictor: nn.Module | None = None,
    ) -> None:
        super().__init__(backbone, objective, head)
        if predictor is None:
            predictor = prediction_head(self.head_name, self.embedding_dim)
        self.predictor = predictor
        self._projected: Tensor | None = None

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        table: PredictorConfig = config.own_table
        hidden = table.predictor_hidden or cls._default_hidden(config)
        branch = setup.branch()
        predictor = mlp([branch.dim, hidden, branch.dim], table.predictor_norm)
        # Further settings of a framework are arguments of the same name.
        others: dict[str, Any] = {name: value for name, value in table if not name.startswith("predictor_")}
        return cls(branch, None, predictor=predictor, **others)

    @classmethod
    def _default_hidden(cls, config: VisionSettings) -> int:
        """Return the default hidden units of the predictor."""
        return config.encoder.hidden or config.encoder.dim

    @classmethod
    def sample(cls, views: int, rows: Rows, labels: Tensor | None) -> AnyPairs:
        return every_view_in_turn(rows(views).unbind(1), rows(views).unbind(1), labels=labels)

    def sides(self, batch: Batch, projected: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return anchors and keys (B, d) of every view, from the projections (B, d) of every view."""
        raise NotImplementedError

    def embed(self, batch: Batch) -> EncodedBatch:
        projected = [self.branch(view) for view in batch.views]
        self._projected = projected[0].detach().clone()  # of a graph that may be replayed
        anchors, keys = self.sides(batch, projected)
        return embedded({"anchor": anchors, "key": keys}, batch, self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> AnyPairs:
        return every_view_in_turn(rows["anchor"], rows["key"], labels=rows.get("labels"), index=rows.get("index"))

    def metrics(self) -> dict[str, Tensor | float]:
        """Return the terms of the objective, and the spread of the last batch. Every rank must call it.

        Returns:
            Numbers and tensors (), by name.
        """
        found = super().metrics()
        return found if self._projected is None else found | {"spread": spread(self._projected)}


def spread(z: Tensor) -> Tensor:
    """Return the mean standard deviation of the coordinates of z / |z| over the rows of all ranks, times sqrt(d).

    About 1 if directions are spread over the sphere, 0 if all rows are one point (Chen & He 2021, Fig. 2).

    Args:
        z: (n, d) of this rank.
    """
    directions = F.normalize(z.float(), dim=1)
    deviation = directions.std(0, correction=0)
    if world_size() > 1:
        count = all_sum(directions.new_tensor(len(directions)))
        mean = all_sum(directions.sum(0)) / count
        deviation = (all_sum((directions - mean).square().sum(0)) / count).sqrt()
    return deviation.mean() * math.sqrt(directions.shape[1])
