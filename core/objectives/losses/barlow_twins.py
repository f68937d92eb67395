"""Redundancy reduction: the cross-correlation of two views should be the identity."""

from typing import Annotated

import torch
from torch import Tensor

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import Range
from dipole.core.utils.distributed import all_sum

EPSILON = 1e-5  # added to the variance, as in the batch norm of the authors' code


def standardized(z: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    """Return z (n, d) with columns of mean 0 and variance 1 over all ranks' rows of weight 1 (n, 1), others 0."""
    centred = weight * (z - all_sum((weight * z).sum(0)) / count)
    return centred / (all_sum(centred.square().sum(0)) / count + EPSILON).sqrt()


@register(
    "barlow_twins",
    aliases=("barlow",),
    formula="sum_i (1 - C_ii)^2 + lambda sum_{i != j} C_ij^2, C_ij = Corr_b( z_bi, z'_bj ) over the batch",
    source="Zbontar et al. 2021, Eqs. 1-2, lambda = 0.0051",
    deviations={
        "Zbontar et al. 2021": (
            "as in the authors' code, lambda is 0.0051 and 1e-5 is added to the variance. The paper prints 0.005",
            "several views: the mean over ordered pairs of views. The paper has two views",
        )
    },
    cost="rows x dim^2 for each pair of views, no similarity matrix",
)
class BarlowTwins(Objective):
    """Barlow Twins: equal columns of two views correlate fully, and different columns do not correlate.

    Formula (Zbontar et al. 2021, Eqs. 1-2), z and z' the embeddings of two views, each column with mean 0 and variance
    1 over the batch of all ranks:
        C_ij = 1/n sum_b z_bi z'_bj,   L = sum_i (1 - C_ii)^2 + redundancy * sum_{i != j} C_ij^2

    With several views or positives, L is computed for each view of the anchors with each of their positives. These
    values are averaged, weighted by the number of rows.

    Args:
        redundancy: lambda >= 0.

    Relations: redundancy = 0 leaves each column's own correlation. Unlike `vicreg`, the loss does not change if a
    column is scaled or shifted.
    """

    needs_negatives = False

    def __init__(
        self, redundancy: Annotated[float, Range(at_least=0), "weight lambda of the entries off the diagonal"] = 0.0051
    ) -> None:
        super().__init__()
        self.redundancy = redundancy

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        pairs = rows.pairs
        candidates = full_precision(pairs.candidates)
        sizes = [count for _, count in pairs.facts.anchor_views]
        values, counts = [], []
        for a, index in zip(rows.x.split(sizes), pairs.positives.split(sizes), strict=True):
            for partner in index.unbind(1):
                weight = (partner >= 0).to(a.dtype).unsqueeze(1)  # (n, 1)
                count = all_sum(weight.sum())
                some = count.clamp_min(1)
                first = standardized(a, weight, some)
                second = standardized(candidates[partner.clamp_min(0)], weight, some)
                correlation = all_sum(first.T @ second) / some
                diagonal = correlation.diagonal()
                others = correlation.square().sum() - diagonal.square().sum()
                values.append((1 - diagonal).square().sum() + self.redundancy * others)
                counts.append(count)
        weights = torch.stack(counts)
        return (torch.stack(values) * weights).sum() / weights.sum().clamp_min(1)
