"""The sigmoid loss: a binary classification of every pair, without a softmax over the batch."""

import math
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from torch.nn.functional import softplus

from dipole.core.objectives.losses.infonce import (
    LARGEST_SCALE,
    SimilarityOption,
    Temperature,
    Tempered,
    learnable,
    undecayed,
)
from dipole.core.objectives.objective import Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.spec import LATER, Range
from dipole.core.objectives.statistics import AnyStatistic, softplus_sum


@register(
    "siglip",
    aliases=("sigmoid",),
    formula="L_i = sum_{p in P(i)} log(1 + e^{-(t s_ip + b)}) + sum_{j in N(i)} log(1 + e^{t s_ij + b}), t = 1/tau",
    source="Zhai et al. 2023, Eq. 1, Algorithm 1",
    deviations={
        "Zhai et al. 2023": (
            "b has the sign of Algorithm 1, which adds it to t s (Eq. 1 subtracts it), and its start of -10",
        )
    },
)
class SigLIP(Tempered):
    """Sigmoid loss: classify each pair as matching or not, with a learned scale and bias.

    Formula (Zhai et al. 2023, Eq. 1), z_ij = t s_ij + b:
        L = 1/|B| sum_i ( sum_{p in P(i)} log(1 + e^{-z_ip}) + sum_{j in N(i)} log(1 + e^{z_ij}) )
    As in the paper, the sum is divided by the number of anchors and not of pairs, so it grows with the batch. With two
    encoders, `Pairs.cross(images, texts)` has every pair once. `Pairs.both` has every pair twice and twice the anchors,
    which gives the same loss. The mean skips anchors without a positive.

    Args:
        temperature: tau = 1/t > 0, or "learned": t = e^{t'}, t' = `logit_scale`, unbounded as in the paper.
        init: initial tau, >= 0.01. Default 0.1 (t' = log 10).
        bias: b, a number or "learned".
        bias_init: initial b. Default -10, at which most pairs of a large batch count as not matching.
        similarity: "cosine", "dot" or "bilinear".

    Raises:
        OptionError: if `init` or `bias_init` is given without a learned value.

    Relations: the binary form of `infonce`, with one sigmoid per pair instead of one softmax per row. With one negative
    and bias 0 it is log(1 + e^{-z_p}) + log(1 + e^{z_n}), where `infonce` has log(1 + e^{z_n - z_p}).
    """

    needs_negatives = False
    first_temperature: ClassVar[float] = 0.1
    largest_scale: ClassVar[float | None] = None

    def __init__(
        self,
        temperature: Temperature = "learned",
        init: Annotated[
            float | None, Range(at_least=1 / LARGEST_SCALE), "start of a learned temperature; 0.1 when none", LATER
        ] = None,
        bias: Annotated[float | Literal["learned"], Range(), "bias b of every pair's logit"] = "learned",
        bias_init: Annotated[float | None, Range(), "start of a learned bias, -10 when none"] = None,
        similarity: SimilarityOption = "cosine",
    ) -> None:
        super().__init__(similarity, temperature, init)
        start = learnable(self.registered_name(), "bias", bias, bias_init, -10.0, "bias_init")
        self.bias: float | Tensor = float(bias) if start is None else undecayed(start)

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"pushes": softplus_sum(1 / self.temperature, self.bias)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        logits = positive / self.temperature + self.bias  # (A, K)
        # softplus turns linear above its threshold; at 50 the difference is below the resolution of float64.
        pulls = softplus(rows.only_positives(-logits, -math.inf), threshold=50)
        return pulls.sum(1) + rows.pushes

    def summary(self) -> dict[str, float]:
        found = super().summary()
        if isinstance(self.bias, Tensor):
            found["bias"] = float(self.bias.detach())
        return found
