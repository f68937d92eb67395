"""Variance, invariance and covariance of whole views."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.pair_data import NO_VIEW
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import Former, Range

Weight = Range(at_least=0)


def spread(z: Tensor, gamma: float, epsilon: float) -> Tensor:
    """Return v(Z), VICReg Eqs. 1-2: the mean over the columns of z (n, d) of [gamma - sqrt(Var + epsilon)]_+."""
    variance = (z - z.mean(0)).square().sum(0) / max(1, len(z) - 1)
    return (gamma - (variance + epsilon).sqrt()).clamp_min(0).mean()


def redundancy(z: Tensor) -> Tensor:
    """Return c(Z), VICReg Eqs. 3-4: the summed squared covariances of different columns of z (n, d), over d."""
    centred = z - z.mean(0)
    covariance = centred.T @ centred / max(1, len(z) - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]


@register(
    "vicreg",
    formula="w_s mean_{i,p} ||a_i - c_p||^2 / d + w_v (v(Z) + v(Z'))/2 + w_c (c(Z) + c(Z')), "
    "v = mean_j [gamma - sqrt(Var(z_j) + eps)]_+, c = sum_{j != k} Cov(z_j, z_k)^2 / d",
    source="Bardes, Ponce & LeCun 2022, Eqs. 1-6 and Algorithm 1",
    deviations={
        "Bardes et al. 2022": (
            "the distance is divided by d, as in Algorithm 1 and the authors' code. Eq. 5 does not divide",
            "v is the mean over the two views, as in the authors' code. Eq. 6 and Algorithm 1 add it: reduction=sum",
            "c of other than two views is twice the mean over the views",
        )
    },
    cost="rows x dim^2 for the covariances of each view, no similarity matrix",
)
class VICReg(Objective):
    """Variance, invariance, covariance: positives agree, and columns of a view vary and do not correlate.

    Formula (Bardes et al. 2022, Eqs. 1-6), Z and Z' the raw embeddings (n, d) of two views, of the batch of all ranks:
        s = mean_{i, p in P(i)} ||a_i - c_p||^2 / d
        v(Z) = mean_j [ gamma - sqrt( Var(z_j) + epsilon ) ]_+,   c(Z) = 1/d sum_{j != k} Cov(z_j, z_k)^2
        L = invariance * s + variance * ( v(Z) + v(Z') ) / 2 + covariance * ( c(Z) + c(Z') )

    The authors' code takes the mean of v over the views. Eq. 6 adds it (`reduction=sum`). Variances and covariances are
    divided by n - 1. A single row has variance 0. For any number of views, the loss uses the mean of v and twice the
    mean of c. Rows of a queue belong to no view.

    Args:
        invariance: w_s >= 0.
        variance: w_v >= 0.
        covariance: w_c >= 0.
        gamma: standard deviation that a column should have, > 0.
        epsilon: added to the variance, > 0.
        reduction: of v over the views: "mean" (the authors' code) or "sum" (Eq. 6, twice the mean for any number).

    Relations: variance = covariance = 0 leaves the squared distance of raw positives, times 25/d by default. The
    covariance is within a view, where `barlow_twins` correlates two views.
    """

    needs_negatives = False

    def __init__(
        self,
        invariance: Annotated[float, Weight, "weight of the distance to the positives"] = 25.0,
        variance: Annotated[float, Weight, "weight of the hinge on standard deviations"] = 25.0,
        covariance: Annotated[float, Weight, "weight of the squared covariances"] = 1.0,
        gamma: Annotated[float, Range(above=0), "standard deviation that a column should have"] = 1.0,
        epsilon: Annotated[float, Range(above=0), "added to the variance"] = 1e-4,
        reduction: Annotated[Literal["mean", "sum"], "of v over the two views", Former("sum")] = "mean",
    ) -> None:
        super().__init__()
        self.invariance = invariance
        self.variance = variance
        self.covariance = covariance
        self.gamma = gamma
        self.epsilon = epsilon
        self.reduction = reduction

    def prepare(self, pairs: Pairs) -> Pairs:
        return pairs.with_intra_batch()  # views that are only anchors (queries) have a variance too

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        candidates, index = full_precision(rows.pairs.candidates), rows.pairs.positives
        near = [(rows.x - candidates[index[:, n].clamp_min(0)]).square().mean(1) for n in range(index.shape[1])]
        runs = rows.pairs.facts.candidate_views
        parts = candidates.split([count for _, count in runs])
        views = [part for (view, _), part in zip(runs, parts, strict=True) if view != NO_VIEW]
        spreads = torch.stack([spread(z, self.gamma, self.epsilon) for z in views])
        redundancies = torch.stack([redundancy(z) for z in views])
        return (
            self.invariance * rows.mean(rows.over_positives(torch.stack(near, 1)))
            + self.variance * (2 if self.reduction == "sum" else 1) * spreads.mean()
            + self.covariance * 2 * redundancies.mean()
        )
