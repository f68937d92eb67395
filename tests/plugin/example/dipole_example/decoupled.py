"""A third-party objective: everything that a package needs to add one name to dipole."""

from typing import Annotated

import torch
from torch import Tensor

from dipole import AnyStatistic, LogSumExp, Objective, Range, Rows, register
from dipole.reference import Case, cosine


@register(
    "decoupled", formula="L_i = mean_{p in P(i)} -s_ip/tau + log sum_{j in N(i)} e^{s_ij/tau}", source="Yeh et al. 2022"
)
class Decoupled(Objective):
    """InfoNCE whose denominator leaves out the positive, so that easy positives keep their gradient.

    Args:
        temperature: tau > 0.
    """

    def __init__(self, temperature: Annotated[float, Range(above=0), "softmax temperature tau"] = 0.1) -> None:
        super().__init__("cosine")
        self.temperature = temperature

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"negatives": LogSumExp(1 / self.temperature)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        return rows.negatives - rows.over_positives(positive / self.temperature)

    @staticmethod
    def reference(case: Case, *, temperature: float) -> Tensor:
        """The formula once more as loops, which makes `dipole check decoupled` exact."""
        losses = []
        for i in case.counted():
            a, negatives = case.anchors[i], case.negatives(i)
            if negatives:
                pull = sum(cosine(a, case.candidates[p]) for p in case.positives[i]) / len(case.positives[i])
                push = sum((cosine(a, case.candidates[j]) / temperature).exp() for j in negatives)
                losses.append(-pull / temperature + torch.log(torch.as_tensor(push)))
            else:
                losses.append(torch.zeros((), dtype=torch.float64))
        return torch.stack(losses).mean()
