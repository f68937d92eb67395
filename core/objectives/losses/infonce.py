"""InfoNCE, the base of most other losses: a softmax that has to find the positive among the negatives.

`Tempered` is the base of all objectives with a temperature.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dipole.core.objectives.objective import Objective, Rows
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import Similarity
from dipole.core.objectives.spec import LATER, Range
from dipole.core.objectives.statistics import AnyStatistic, log_sum_exp
from dipole.core.utils.errors import OptionError

LARGEST_SCALE = 100.0  # the upper limit of CLIP's scale 1/tau. It is a temperature of 0.01

SimilarityOption = Annotated[Similarity, "cosine of normalised embeddings, their plain dot product, or a^T W c"]
Temperature = Annotated[
    float | Literal["learned"], Range(above=0), "softmax temperature tau; learned: CLIP's logit scale log(1/tau)"
]
Init = Annotated[
    float | None, Range(at_least=1 / LARGEST_SCALE), "start of a learned temperature; 0.07 when none", LATER
]


def learnable(
    owner: str, name: str, value: float | str, init: float | None, default: float, init_name: str = "init"
) -> float | None:
    """Return the start value of a learned number. None if it is fixed, and then it takes no start value."""
    if value == "learned":
        if init is None:
            return default
        return init
    if init is not None:
        raise OptionError(
            f"{owner}: {init_name}={init:g} is where a learned {name} starts, but {name} is {value:g}. Write "
            f"{name}=learned, {init_name}={init:g}, or {name}={init:g} alone.",
            init_name,
        )
    return None


class Tempered(Objective):
    """An objective whose similarities are divided by a temperature, which may be learned.

        >>> (term,) = dipole.objective("infonce(temperature=0.2)").terms
        >>> isinstance(term, Tempered), term.temperature
        (True, 0.2)

    Formula (Radford et al. 2021, Sec. 2.4): tau = e^{-u} with u = `logit_scale`. Each step clamps u to at most log 100.

    Args:
        similarity: as in `Objective`.
        temperature: tau > 0, or "learned".
        init: start value of a learned tau, >= 0.01. The default is 0.07.

    Raises:
        OptionError: `init` is given without a learned temperature, an option is out of its range, or you set
            `temperature` although it is learned.
    """

    needs_learning_rate = False
    first_temperature: ClassVar[float] = 0.07
    largest_scale: ClassVar[float | None] = LARGEST_SCALE

    def __init__(self, similarity: Similarity, temperature: Temperature, init: Init = None) -> None:
        super().__init__(similarity)
        start = learnable(self.registered_name(), "temperature", temperature, init, self.first_temperature)
        self._temperature = 0.0 if temperature == "learned" else float(temperature)
        self.logit_scale = None if start is None else undecayed(-math.log(start))

    @property
    def temperature(self) -> float | Tensor:
        """Temperature tau. A learned temperature is a tensor, (), with gradient."""
        if self.logit_scale is None:
            return self._temperature
        return (-self.logit_scale).exp()

    @temperature.setter
    def temperature(self, value: float) -> None:
        if self.logit_scale is not None:
            raise OptionError(
                f"{self.registered_name()}: the temperature is learned and cannot be set. Give a number instead of "
                "temperature=learned.",
                "temperature",
            )
        self._temperature = value

    def after_step(
        self, learning_rate: float, weight: float, step: int | None = None, total: int | None = None
    ) -> None:
        super().after_step(learning_rate, weight, step, total)
        if self.logit_scale is not None and self.largest_scale is not None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.largest_scale))

    def summary(self) -> dict[str, float]:
        found, tau = super().summary(), self.temperature
        if isinstance(tau, Tensor):
            found["temperature"] = float(tau.detach())
        return found


def undecayed(value: float) -> nn.Parameter:
    """Return a learned number, (), without weight decay."""
    parameter = nn.Parameter(torch.tensor(value))
    parameter.undecayed = True  # type: ignore[attr-defined]
    return parameter


def one_against_many(positive: Tensor, log_negatives: Tensor) -> Tensor:
    """Return -log( e^p / (e^p + G) ) from logits p (A, K) and log G, broadcastable to (A, K)."""
    # softplus turns linear above its threshold; at 50 the difference is below the resolution of float64.
    return softplus(log_negatives - positive, threshold=50)


def log_sum_of_positives(positive: Tensor, rows: Rows) -> Tensor:
    """Return log sum_p e^{l_ip}, (A,), of logits (A, K). Without positives, where no mean counts it, it is finite."""
    mask = rows.pairs.positive_mask
    if mask is not None:
        positive = torch.where(mask | ~mask.any(1, keepdim=True), positive, -torch.inf)
    return torch.logsumexp(positive, 1)


def joint_softmax(positive: Tensor, log_negatives: Tensor, rows: Rows) -> Tensor:
    """Return the cross entropy (A,) of one softmax with a uniform target over the positives."""
    mine = log_sum_of_positives(positive, rows)
    return one_against_many(mine, log_negatives) + mine - rows.over_positives(positive)


@register(
    "infonce",
    aliases=("nt_xent", "ntxent"),
    formula="L_i = mean_{p in P(i)} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + sum_{j in N(i)} e^{s_ij/tau} ) )",
    source="LMCL Eq. 1; CACR Eq. 1; NT-Xent of Chen et al. 2020, Eq. 1; bilinear: CURL agent of Laskin et al. 2020",
    deviations={
        "LMCL": (
            "Eq. 1 has raw dot products of unit vectors and no temperature. The defaults are cosine and temperature "
            "0.5. similarity=dot, temperature=1 is Eq. 1",
        ),
        "CACR": (
            "Eq. 1 in the K x (1 against M) form of CMC: the mean over the K positives. joint=true is one softmax",
        ),
        "CLLR": ("Eq. 1 uses raw embeddings of fixed scale. The default is cosine, and similarity=dot is the paper's",),
    },
)
class InfoNCE(Tempered):
    """InfoNCE (NT-Xent): each positive against all negatives. With K positives, their mean.

    Formula (LMCL Eq. 1):
        L_i = mean_{p in P(i)} -log( e^{s_ip/tau} / ( e^{s_ip/tau} + sum_{j in N(i)} e^{s_ij/tau} ) )

    Args:
        temperature: tau > 0, or "learned", CLIP's logit scale, at most 100 (tau >= 0.01).
        similarity: "cosine", "dot" or "bilinear" (s_ij = a_i^T W c_j, where W starts as the identity).
        init: initial value of a learned temperature, >= 0.01. None means 0.07.
        joint: put all positives of an anchor into one softmax with a uniform target (Quick Thoughts). By default, each
            positive has its own softmax with the negatives.

    Raises:
        OptionError: if `init` is given without a learned temperature.

    A CURL agent (Laskin et al. 2020) uses `infonce(similarity=bilinear, temperature=1)`.

    Relations: `dcl(rho=0)` and `hcl(rho=0, beta=0)` equal it. `quickthoughts` is InfoNCE with dot products,
    temperature 1 and `joint`. Weights (A, K) of pairs with `joint` are soft targets.
    """

    weighting: Literal["rows", "pairs", "own"] | None = "pairs"

    def __init__(
        self,
        temperature: Temperature = 0.5,
        similarity: SimilarityOption = "cosine",
        joint: Annotated[bool, "all positives in one softmax with a uniform target"] = False,
        init: Init = None,
    ) -> None:
        super().__init__(similarity, temperature, init)
        self.joint = joint

    def statistics(self) -> dict[str, AnyStatistic]:
        return {"negatives": log_sum_exp(1 / self.temperature)}

    def loss(self, positive: Tensor, rows: Rows) -> Tensor:
        logits = positive / self.temperature  # (A, K)
        if self.joint:
            return joint_softmax(logits, rows.negatives, rows)
        return rows.over_positives(one_against_many(logits, rows.negatives.unsqueeze(1)))


@register(
    "quickthoughts",
    aliases=("qt", "quick_thoughts"),
    formula="L_i = log( sum_{j in P(i) + N(i)} e^{a_i . c_j} ) - mean_{p in P(i)} a_i . c_p",
    source="Logeswaran & Lee 2018, Eqs. 1-2; LMCL Sec. 5.3",
    deviations={"LMCL": (), "CLLR": ()},
)
class QuickThoughts(InfoNCE):
    """Quick Thoughts: the neighbours of a sentence in one softmax with a uniform target, raw dot products.

    Formula (Logeswaran & Lee 2018, Eqs. 1-2; LMCL Sec. 5.3):
        L_i = log( sum_{j in P(i) + N(i)} e^{s_ij/tau} ) - mean_{p in P(i)} s_ip/tau

    Args:
        temperature: tau > 0, or "learned". The authors use none (1).
        similarity: "cosine", "dot" or "bilinear". The authors use "dot", without normalisation.
        init: initial value of a learned temperature, >= 0.01. None means 0.07.

    Raises:
        OptionError: if `init` is given without a learned temperature.

    Relations: `infonce(similarity=dot, temperature=1, joint=true)` under its own name.
    """

    def __init__(self, temperature: Temperature = 1.0, similarity: SimilarityOption = "dot", init: Init = None) -> None:
        super().__init__(temperature, similarity, joint=True, init=init)
