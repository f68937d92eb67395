"""Swapped prediction of cluster assignments."""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.pair_data import NO_VIEW, Runs
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision, normalize
from dipole.core.objectives.spec import Former, Range


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return soft assignments (N, P) of equal total weight per prototype, by Sinkhorn-Knopp in the log domain."""
    log_q = scores / epsilon
    for _ in range(iterations):
        log_q = log_q - torch.logsumexp(log_q, 0, keepdim=True)
        log_q = log_q - torch.logsumexp(log_q, 1, keepdim=True)
    return log_q.exp()


def codes_of_crops(scores: Tensor, runs: Runs, epsilon: float, iterations: int) -> Tensor:
    """Return the codes (C, P) of all candidates: those of each crop (a run of rows) together with the queue's rows."""
    parts = scores.split([count for _, count in runs])
    queue = [part for (view, _), part in zip(runs, parts, strict=True) if view == NO_VIEW]
    codes = []
    for (view, count), part in zip(runs, parts, strict=True):
        together = torch.cat([*queue, part]) if view != NO_VIEW else part
        codes.append(sinkhorn(together, epsilon, iterations)[len(together) - count :])
    return torch.cat(codes)


@register(
    "swav",
    formula="L = mean_{i, p in P(i)} -sum_k q_pk log softmax_k( z_i . v_k / tau ), q by Sinkhorn-Knopp",
    source="Caron et al. 2020, Eqs. 1-5",
    deviations={
        "LMCL": ("settings are those of Caron et al.",),
        "CLLR": ("settings are those of Caron et al.",),
        "Caron et al. 2020": (
            "codes are computed for each crop, as in the authors' code. codes=all computes those of all candidates "
            "together",
            "the queue holds past embeddings of all large crops, in the authors' code those of each crop",
        ),
    },
    cost="rows x prototypes; no similarity matrix of rows",
)
class SwAV(Objective):
    """Swapped prediction: each view predicts the cluster assignment (code) of its positives.

    Formula (Caron et al. 2020, Eqs. 1-5), z and prototypes v of unit length:
        q = Sinkhorn-Knopp( z . v / epsilon ) over the candidates of a crop and the queue, without gradient
        L = mean_{i, p in P(i)} -sum_k q_pk log softmax_k( z_i . v_k / tau )

    All pairs of a crop and a code weigh alike: 1/14 with 2 large and 6 small crops.

    Args:
        prototypes: number of prototypes, >= 2.
        dim: width of the embeddings, >= 1. None takes it from the first call (or `objective(..., dim=)`).
        temperature: tau > 0.
        epsilon: entropy of the codes, > 0.
        iterations: number of Sinkhorn-Knopp iterations, >= 1.
        codes: "crop" computes the codes of each crop, "all" those of all candidates together.

    Raises:
        PairsError: if the width of the embeddings changes.
        OptionError: if the prototypes would not fit into memory.

    Relations: `cross_entropy` on unit vectors at temperature tau. Labels are the positives' codes, and prototypes are
    the class vectors.
    """

    needs_negatives = False
    weighting = "pairs"

    def __init__(
        self,
        prototypes: Annotated[int, Range(at_least=2), "number of prototypes"] = 300,
        dim: Annotated[int | None, Range(at_least=1), "width of the embeddings"] = None,
        temperature: Annotated[float, Range(above=0), "softmax temperature tau over the prototypes"] = 0.1,
        epsilon: Annotated[float, Range(above=0), "entropy of the codes"] = 0.05,
        iterations: Annotated[int, Range(at_least=1), "Sinkhorn-Knopp iterations"] = 3,
        codes: Annotated[Literal["crop", "all"], "of each crop, or of all candidates together", Former("all")] = "crop",
    ) -> None:
        super().__init__("cosine")
        self.count = prototypes
        self.temperature = temperature
        self.epsilon = epsilon
        self.iterations = iterations
        self.codes = codes
        self.prototypes = UninitializedParameter()
        if dim is not None:
            self.build(dim)

    def build(self, dim: int) -> None:
        self.materialize("prototypes", (self.count, dim), nn.init.normal_)

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        prototypes = normalize(full_precision(self.prototypes)).to(rows.x.dtype)
        scores = rows.y @ prototypes.T
        runs = rows.pairs.facts.candidate_views if self.codes == "crop" else ((0, len(scores)),)
        codes = codes_of_crops(scores, runs, self.epsilon, self.iterations)  # (C, P)
        log_prediction = torch.log_softmax(rows.x @ prototypes.T / self.temperature, 1)  # (A, P)
        index = rows.pairs.positives
        chosen = [-(codes[index[:, n].clamp_min(0)] * log_prediction).sum(1) for n in range(index.shape[1])]
        return rows.mean_over_pairs(torch.stack(chosen, 1))
