"""Alignment and uniformity on the sphere, and the alignment alone: the regression of BYOL and SimSiam."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import Former, Range
from dipole.core.objectives.statistics import AnyStatistic, LogSumExp
from dipole.core.utils.distributed import log_mean_exp


def align(positive: Tensor, alpha: float) -> Tensor:
    """Return ||a - c||_2^alpha of unit vectors from their cosine. Equal vectors give 0 with zero gradient."""
    squared = (2 - 2 * positive).clamp_min(0)
    if alpha == 2:
        return squared
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0) ** (alpha / 2), 0.0)


def log_mean_kernel(
    potential: Tensor, count: Tensor, positive: Tensor, mask: Tensor | None, views: bool, t: float
) -> Tensor:
    """Return log mean e^{-t ||z_i - z_j||^2} over pairs of different instances.

    `potential` (A,) is the log of the summed e^{2t s} over the `count` (A,) negatives. `positive` (A, K) are cosines,
    real where the mask is. They are pairs like the negatives, unless they are views.
    """
    if not views and positive.shape[1]:
        near = 2 * t * positive if mask is None else torch.where(mask, 2 * t * positive, -torch.inf)
        potential = torch.logsumexp(torch.cat([potential.unsqueeze(1), near], 1), 1)
        count = count + (positive.shape[1] if mask is None else mask.sum(1))
    return log_mean_exp(potential, count) - 2 * t


@register(
    "align_uniform",
    aliases=("au_cl", "au"),
    formula="w_a mean_{i,p} ||a_i - c_p||^alpha + w_u log mean_{i,j} e^{-t ||z_i - z_j||^2}, within each view",
    source="Wang & Isola 2020, Sec. 4.1; CACR Table 2 (AU-CL)",
    deviations={
        "CACR": ("AU-CL is listed with a temperature of 0.19 or 0.2. The loss of Wang and Isola has none",),
        "Wang & Isola 2020": (
            "alpha = 2, t = 2 and both weights 1 by default. The paper tunes them for each data set",
            "the uniformity is the mean over the views, as in the authors' code. uniform_over=pairs takes all pairs of "
            "different instances in one logarithm, as the paper prints it",
        ),
    },
)
class AlignUniform(Objective):
    """Alignment of positives plus uniformity of different instances, both on the unit sphere.

    Formula (Wang & Isola 2020, Sec. 4.1):
        align   = mean_{i, p in P(i)} ||a_i - c_p||_2^alpha
        uniform = log mean_{i,j} e^{-t ||z_i - z_j||^2}, over pairs of different instances from the same view, the mean
            over views
        L = align_weight * align + uniform_weight * uniform

    With several views of an image (SimCLR), each view has a uniformity, as in the authors' code. With
    `uniform_over=pairs` one logarithm is over all pairs of different instances from the same encoder.

    Two encoders (Quick Thoughts' f and g, the halves of CMC, queries and keys) each have a uniformity, and the loss
    uses their mean. Pairs across encoders would be farthest apart at f = -g with each of them a single point. The rows
    of MoCo's queue belong to the queries, and the keys of the batch have no uniformity, as in the authors' code. The
    rows of CMC's memory bank belong to the half that made them (`Pairs.cross(queue_of="keys")`).

    Args:
        alpha: exponent of the alignment distance, > 0.
        t: precision of the Gaussian potential, > 0.
        align_weight: w_a >= 0.
        uniform_weight: w_u >= 0.
        uniform_over: "views" averages the uniformity of each view, "pairs" takes all pairs of an encoder together.

    Relations: uniform_weight = 0 equals `regression`. The repulsion of `cacr(cost=rbf, negative_weights=uniform)` is
    the uniformity over pairs at t = rbf_t.
    """

    positives_are_pairs = True

    def __init__(
        self,
        alpha: Annotated[float, Range(above=0), "exponent of the alignment distance"] = 2.0,
        t: Annotated[float, Range(above=0), "precision of the Gaussian potential"] = 2.0,
        align_weight: Annotated[float, Range(at_least=0), "weight of the alignment"] = 1.0,
        uniform_weight: Annotated[float, Range(at_least=0), "weight of the uniformity"] = 1.0,
        uniform_over: Annotated[
            Literal["views", "pairs"], "each view, or all pairs of an encoder, in a logarithm", Former("pairs")
        ] = "views",
    ) -> None:
        super().__init__("cosine")
        self.alpha = alpha
        self.t = t
        self.align_weight = align_weight
        self.uniform_weight = uniform_weight
        self.uniform_over = uniform_over

    def prepare(self, pairs: Pairs) -> Pairs:
        return pairs.within_sides()[0]

    def extra_pairs(self, pairs: Pairs) -> tuple[Pairs, ...]:
        if self.uniform_over == "views":
            return pairs.within_views()
        return pairs.within_sides()[1:]

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"potential": LogSumExp(2 * self.t)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        alignment = rows.mean(rows.over_positives(align(positive, self.alpha)))
        pairs = rows.pairs
        of_sides = []
        if self.uniform_over == "pairs" or not pairs.split_by_view:
            mask = pairs.positive_mask
            of_sides.append(log_mean_kernel(rows.potential, rows.count, positive, mask, pairs.views, self.t))
        for side in rows.extra_pairs:
            of_sides.append(log_mean_exp(side.potential, side.count) - 2 * self.t)
        return self.align_weight * alignment + self.uniform_weight * torch.stack(of_sides).mean()


@register(
    "regression",
    aliases=("byol",),
    formula="L_i = mean_{p in P(i)} || a_i / |a_i| - c_p / |c_p| ||^2 = mean_{p in P(i)} 2 - 2 cos(a_i, c_p)",
    source="Grill et al. 2020, Eq. 2 (BYOL); Chen & He 2021, Eq. 1 (SimSiam): L = 2 D + 2",
    deviations={
        "Grill et al. 2020": ("the two directions are averaged. The paper adds them: 2*regression is the paper's",),
        "Chen & He 2021": ("2 + 2 D has twice the gradient: 0.5*regression has the paper's",),
    },
    cost="rows x positives, no similarity matrix",
)
class Regression(Objective):
    """Squared distance of unit vectors to the positives, without repulsion: BYOL's and SimSiam's loss.

    Formula (Grill et al. 2020, Eq. 2):
        L_i = mean_{p in P(i)} 2 - 2 cos(a_i, c_p)

    Its minimum is all embeddings at one point. Use it in frameworks that stop the gradient of the positives and put a
    predictor before the anchors (`vision.method` `byol` and `simsiam`). Elsewhere embeddings collapse.

    Relations: the alignment of `align_uniform` with alpha = 2.
    """

    needs_negatives = False
    weighting = "pairs"

    def __init__(self) -> None:
        super().__init__("cosine")

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        return rows.over_positives(align(positive, 2.0))
