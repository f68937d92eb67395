"""Consistent contrast: a query and its positive should have the same similarities to the negatives."""

from typing import Annotated

import torch
from torch import Tensor

from dipole.core.objectives.losses.infonce import Init, SimilarityOption, Temperature, Tempered, one_against_many
from dipole.core.objectives.objective import Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, log_sum_exp


def symmetric_kl(p_logits: Tensor, q_logits: Tensor, allowed: Tensor) -> Tensor:
    """Return ( KL(p|q) + KL(q|p) ) / 2 of two softmaxes over the allowed entries of each row, (A,)."""
    log_p = torch.log_softmax(torch.where(allowed, p_logits, -torch.inf), 1)
    log_q = torch.log_softmax(torch.where(allowed, q_logits, -torch.inf), 1)
    gap = torch.where(allowed, log_p - log_q, 0.0)
    return 0.5 * ((log_p.exp() - log_q.exp()) * gap).sum(1)


@register(
    "co2",
    formula="L_i = infonce_i + weight * ( KL(p_i | q_i) + KL(q_i | p_i) ) / 2, p_i, q_i softmaxes over N(i)",
    source="Wei et al. 2021",
    deviations={
        "CLLR": ("settings are those of Wei et al.",),
        "Wei et al. 2021": ("similarities of the positive have the candidates' side for both arguments",),
    },
    cost="two dense (A, C) matrices: memory quadratic in the batch",
)
class CO2(Tempered):
    """InfoNCE plus consistency: the anchor's and its positive's softmax over the negatives should agree.

    Formula (Wei et al. 2021):
        p_ij ~ e^{s(a_i, c_j)/tau'}, q_ij ~ e^{s(c_p, c_j)/tau'} over j in N(i), p the (first) positive of i
        L_i = InfoNCE_i + weight * ( KL(p_i | q_i) + KL(q_i | p_i) ) / 2

    Args:
        temperature: tau of InfoNCE, > 0, or "learned".
        weight: of the consistency term, >= 0.
        consistency_temperature: tau' > 0. None means `temperature`.
        similarity: of both softmaxes: "cosine", "dot" or "bilinear".
        init: initial value of a learned temperature, >= 0.01. None means 0.07.

    Raises:
        OptionError: if `init` is given without a learned temperature.

    Relations: weight = 0 equals `infonce`.

    Source: equations of the paper. The similarities of the positive use the candidates' side for both arguments.
    """

    def __init__(
        self,
        temperature: Temperature = 0.5,
        weight: Annotated[float, Range(at_least=0), "weight of the consistency term"] = 0.3,
        consistency_temperature: Annotated[float | None, Range(above=0), "tau' of the two softmaxes"] = None,
        similarity: SimilarityOption = "cosine",
        init: Init = None,
    ) -> None:
        super().__init__(similarity, temperature, init)
        self.weight = weight
        self.consistency_temperature = consistency_temperature

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"negatives": log_sum_exp(1 / self.temperature)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        base = rows.over_positives(one_against_many(positive / self.temperature, rows.negatives.unsqueeze(1)))
        pairs = rows.pairs
        # Rows without negatives are dropped below, but must stay finite.
        allowed = pairs.negative_mask() | (rows.count == 0).unsqueeze(1)
        tau = self.temperature if self.consistency_temperature is None else self.consistency_temperature
        key = pairs.positives[:, 0].clamp_min(0)
        own = rows.x @ rows.y.t() / tau  # (A, C)
        keys = own.index_select(0, key) if rows.x is rows.y else rows.y.index_select(0, key) @ rows.y.t() / tau
        consistency = symmetric_kl(own, keys, allowed)
        return base + self.weight * torch.where(rows.count > 0, consistency, 0.0)
