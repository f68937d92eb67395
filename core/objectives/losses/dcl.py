"""Debiased contrastive loss, corrected for hidden positives among the negatives, and its form with hard negatives."""

import math
from typing import Annotated

import torch
from torch import Tensor

from dipole.core.objectives.losses.infonce import Init, SimilarityOption, Temperature, Tempered, one_against_many
from dipole.core.objectives.objective import Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, Extreme, log_sum_exp

Prior = Annotated[float, Range(at_least=0, below=1), "class prior: chance that a negative shares the anchor's class"]


def debiased(log_sum: Tensor, positive: Tensor, count: Tensor, rho: float, log_floor: Tensor) -> Tensor:
    """Return log max( ( e^{log_sum} - rho M e^{positive} ) / (1 - rho), e^{log_floor} ), (A, K), computed in logs.

    `positive` (A, K) are logits, and the other tensors are (A, 1). `count` is M, the number of negatives.
    """
    if rho == 0:
        return log_sum.expand_as(positive)  # no sum is below the floor
    gap = (rho * count).log() + positive - log_sum  # log of (the subtracted part / the sum)
    # Nearer to 0 than the resolution, 1 - e^gap would be 0 and its logarithm's gradient infinite.
    room = gap < -torch.finfo(gap.dtype).eps
    inside = log_sum + torch.log1p(-torch.where(room, gap, -1.0).exp()) - math.log1p(-rho)
    return torch.where(room & (inside >= log_floor), inside, log_floor)


@register(
    "dcl",
    aliases=("debiased",),
    formula="G_i = max( (sum_j e^{s_ij/tau} - rho M e^{s_ip/tau}) / (1 - rho), M e^{-1/tau} ); "
    "L_i = -log( e^{s_ip/tau} / (e^{s_ip/tau} + G_i) )",
    source="Chuang et al. 2020, Sec. 4; LMCL Sec. 5",
    deviations={
        "LMCL": ("rho and temperature are not stated: 0.1 and 0.5, from the authors of DCL",),
        "CLLR": ("as for LMCL",),
        "Chuang et al. 2020": (
            "unbounded similarities have no floor in the paper: the row's smallest one replaces -1",
        ),
    },
)
class DCL(Tempered):
    """Debiased contrastive loss: removes the expected share of same-class points from the negatives.

    Formula (Chuang et al. 2020, Sec. 4), M = |N(i)|:
        G_i = max( ( sum_{j in N(i)} e^{s_ij/tau} - rho M e^{s_ip/tau} ) / (1 - rho),  M e^{-1/tau} )
        L_i = mean_{p in P(i)} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + G_i ) )

    Args:
        rho: class prior in [0, 1).
        temperature: tau > 0, or "learned".
        similarity: "cosine", "dot" or "bilinear". The last two are unbounded. Their floor is M e^{s_min/tau}, with
            s_min the row's smallest similarity to a negative, without gradient.
        init: initial value of a learned temperature, >= 0.01. None means 0.07.

    Raises:
        OptionError: if `init` is given without a learned temperature.

    Relations: rho = 0 is InfoNCE. `hcl(beta=0)` is DCL.
    """

    weighting = "pairs"

    def __init__(
        self,
        rho: Prior = 0.1,
        temperature: Temperature = 0.5,
        similarity: SimilarityOption = "cosine",
        init: Init = None,
    ) -> None:
        super().__init__(similarity, temperature, init)
        self.rho = rho

    def statistics(self) -> dict[str, AnyStatistic]:
        wanted: dict[str, AnyStatistic] = {"negatives": log_sum_exp(1 / self.temperature)}
        if self.similarity != "cosine":
            wanted["farthest"] = Extreme(largest=False)
        return wanted

    def log_floor(self, rows: Rows) -> Tensor:
        """Return log( M e^{s_min/tau} ), (A, 1)."""
        if self.similarity == "cosine":
            lowest = rows.count.new_full((len(rows.count), 1), -1.0)
        else:
            lowest = rows.similarity(rows.farthest.unsqueeze(1)).detach()
        return rows.count.log().unsqueeze(1) + lowest / self.temperature

    def log_sum(self, rows: Rows) -> Tensor:
        """Return the log of the summed (weighted) negatives, (A,)."""
        return rows.negatives

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        logits = positive / self.temperature  # (A, K)
        negatives = debiased(
            self.log_sum(rows).unsqueeze(1), logits, rows.count.unsqueeze(1), self.rho, self.log_floor(rows)
        )
        return rows.over_positives(one_against_many(logits, negatives))


@register(
    "hcl",
    aliases=("hard_negatives", "hn_cl"),
    formula="w_ij = e^{beta s_ij/tau} / mean_k e^{beta s_ik/tau}; G_i as in dcl with w_ij e^{s_ij/tau}",
    source="Robinson et al. 2021; LMCL Sec. 5",
    deviations={
        "LMCL": ("beta, rho and temperature are not stated: 1, 0.1 and 0.5",),
        "CACR": ("HN-CL: rho is not stated, 0.1",),
        "CLLR": ("as for LMCL",),
        "Robinson et al. 2021": ("the weights carry gradient, as in the authors' code",),
    },
)
class HCL(DCL):
    """Hard-negative contrastive loss: importance sampling gives negatives near the anchor more weight.

    Formula (Robinson et al. 2021):
        w_ij = e^{beta s_ij/tau} / mean_{k in N(i)} e^{beta s_ik/tau}
        G_i = max( ( sum_j w_ij e^{s_ij/tau} - rho M e^{s_ip/tau} ) / (1 - rho),  M e^{-1/tau} ); the rest as in DCL

    Args:
        beta: concentration >= 0.
        rho: class prior in [0, 1).
        temperature: tau > 0, or "learned".
        similarity: "cosine", "dot" or "bilinear". The floor is that of `dcl`.
        init: initial value of a learned temperature, >= 0.01. None means 0.07.

    Raises:
        OptionError: if `init` is given without a learned temperature.

    Source: formula of the paper. The weights have a gradient, as in the authors' code.
    Relations: beta = 0 is DCL.
    """

    def __init__(
        self,
        beta: Annotated[float, Range(at_least=0), "concentration on similar negatives"] = 1.0,
        rho: Prior = 0.1,
        temperature: Temperature = 0.5,
        similarity: SimilarityOption = "cosine",
        init: Init = None,
    ) -> None:
        super().__init__(rho, temperature, similarity, init)
        self.beta = beta

    def statistics(self) -> dict[str, AnyStatistic]:
        wanted = super().statistics()
        if self.beta:
            wanted["weights"] = log_sum_exp(self.beta / self.temperature)
            wanted["weighted"] = log_sum_exp((1 + self.beta) / self.temperature)
            del wanted["negatives"]
        return wanted

    def log_sum(self, rows: Rows) -> Tensor:
        if not self.beta:
            return rows.negatives
        weights = rows.weights.masked_fill(rows.count == 0, 0.0)  # -inf, like the weighted sum
        return rows.weighted - weights + rows.count.log()
