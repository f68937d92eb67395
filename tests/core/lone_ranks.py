"""Objectives for two ranks: in a module of their own, as other processes import it."""

import torch
from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows


class Spread(Objective):
    """A hinge on the variance of all ranks' candidates: the same scalar on every rank."""

    needs_negatives = False

    def __init__(self) -> None:
        super().__init__("dot")

    def spread(self, rows: Rows) -> Tensor:
        return (2 - (rows.pairs.candidates.var(0) + 1e-4).sqrt()).clamp_min(0).mean()

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        return rows.mean(rows.over_positives((1 - positive).square())) + self.spread(rows)


class SpreadOfAnchors(Spread):
    """The variance of this rank's anchors, which other ranks do not know."""

    def spread(self, rows: Rows) -> Tensor:
        return (2 - (rows.pairs.anchors.var(0) + 1e-4).sqrt()).clamp_min(0).mean()


class MeanOfRank(Spread):
    """The mean over this rank's anchors: another number on each rank, where their shares are unequal."""

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        return rows.over_positives((1 - positive).square()).mean() + self.spread(rows)


class LeavesRankOne(Spread):
    """Ends the process of one rank."""

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        import os

        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            os._exit(3)
        return super().loss(positive, rows)
