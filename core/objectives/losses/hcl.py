"""Hard negatives: DCL whose negatives are weighted by similarity."""

from typing import Annotated

from torch import Tensor

from dipole.core.objectives.losses.dcl import DCL, Prior
from dipole.core.objectives.losses.infonce import Init, SimilarityOption, Temperature
from dipole.core.objectives.objective import Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import Range
from dipole.core.objectives.statistics import AnyStatistic, log_sum_exp


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
