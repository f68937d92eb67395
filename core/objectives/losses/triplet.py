"""Triplet loss with a margin, over expectations or over the hardest pairs."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, Extreme, Sum


@register(
    "triplet",
    formula="L_i = [ E_{p in P(i)} c(a_i, c_p) - E_{j in N(i)} c(a_i, c_j) + m ]_+, c = ||x - y||^2 of unit vectors",
    source="CACR App. B.5; Schroff et al. 2015",
    deviations={"CACR": ("the margin is not stated",)},
)
class Triplet(Objective):
    """Triplet loss with margin over all positives and negatives of an anchor.

    Formula (CACR App. B.5), c(x, y) = ||x - y||^2 of unit vectors:
        L_i = [ E_p c(a_i, c_p) - E_j c(a_i, c_j) + m ]_+

    Args:
        margin: m >= 0, in squared distance of unit vectors (0 to 4).
        mode: "uniform" takes means over positives and negatives. "hardest" takes the farthest positive and the nearest
            negative.

    Relations: "uniform" is UAUR (`cacr` with uniform weights) under a hinge. "hardest" is CACR's limit for sharp
    temperatures under a hinge.
    """

    def __init__(
        self,
        margin: Annotated[float, Range(at_least=0), "margin m in squared distance of unit vectors (0 to 4)"] = 1.0,
        mode: Annotated[Literal["uniform", "hardest"], "means over all pairs, or the hardest pairs"] = "uniform",
    ) -> None:
        super().__init__("cosine")
        self.margin = margin
        self.mode = mode

    def statistics(self) -> dict[str, AnyStatistic]:
        if self.mode == "hardest":
            return {"nearest": Extreme()}
        return {"total": Sum()}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        if self.mode == "hardest":
            attracted = rows.only_positives(positive, torch.inf).amin(1)
            repelled = rows.similarity(rows.nearest.unsqueeze(1)).squeeze(1)
        else:
            attracted = rows.over_positives(positive)
            repelled = rows.total / rows.count.clamp_min(1)
        # c = 2 - 2s, so the difference of costs is twice the difference of similarities.
        return (2 * (repelled - attracted) + self.margin).clamp_min(0)
