"""Options of the theorems, and the facts of a run that they use besides its features."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dipole.core.utils.errors import OptionError

LOSSES = ("hinge", "logistic")
PRIORS = ("measured", "uniform")


@dataclass(frozen=True)
class Choices:
    """Options of `dipole theory`. The options after `delta_neg` are constants that no paper gives.

    Args:
        losses: of Arora's theorems: "hinge", "logistic" or both.
        k: negatives of Theorem 6.1, >= 1. The other theorems use one negative.
        block: members b of a block, >= 1 (Proposition 6.2).
        draws: sets of permutations that blocks are averaged over, >= 1.
        tasks: fitted tasks of the trained classifier, >= 2.
        points: largest number of points, >= 2, chosen by `seed`.
        prior: rho, "measured" or "uniform".
        confidence: 1 - delta of Theorems 4.1, 4.5, 6.1 and LMCL's Theorem 4, in (0, 1).
        seed: of points, tasks and blocks, >= 0.
        epsilon: eps of Lemma 5.1, > 0.
        mu: slack of LMCL's Theorem 3; half the margin when None.
        delta_pos: lower end of the margin of LMCL's theorems, in [0, 1]; the run's when None.
        delta_neg: upper end, likewise.
        constant: factor in the O of a bound, >= 0.
        rademacher: complexity of the class of functions, >= 0.
        tuples: M >= 1; the number of points when None.
        gamma_constant: c' of Lemma 5.1, >= 0; the derived one when None.
        smoothness: S of CLLR's Theorem 2, >= 0.
        data_constant: C(X) of CLLR's Theorem 3, >= 0.

    Raises:
        OptionError: one of them is out of its range.
    """

    losses: tuple[str, ...] = LOSSES
    k: int = 4
    block: int = 5
    draws: int = 4
    tasks: int = 50
    points: int = 1000
    prior: str = "measured"
    confidence: float = 0.95
    seed: int = 0
    epsilon: float = 0.1
    mu: float | None = None
    delta_pos: float | None = None
    delta_neg: float | None = None
    constant: float = 1.0
    rademacher: float = 0.0
    tuples: int | None = None
    gamma_constant: float | None = None
    smoothness: float = 1.0
    data_constant: float = 1.0

    def __post_init__(self) -> None:
        def need(name: str, allowed: str, fine: bool) -> None:
            if not fine:
                raise OptionError(f"{name} must be {allowed}, got {getattr(self, name)}.", name)

        need("losses", f"of {', '.join(LOSSES)}", bool(self.losses) and set(self.losses) <= set(LOSSES))
        need("prior", f"one of {', '.join(PRIORS)}", self.prior in PRIORS)
        for name in ("k", "block", "draws"):
            need(name, "1 or more", getattr(self, name) >= 1)
        need("tasks", "2 or more (their spread gives the error)", self.tasks >= 2)
        need("points", "2 or more", self.points >= 2)
        need("seed", "between 0 and 2^63 - 1", 0 <= self.seed < 2**63)
        need("tuples", "1 or more", self.tuples is None or self.tuples >= 1)
        need("confidence", "between 0 and 1", 0 < self.confidence < 1)
        need("epsilon", "above 0", 0 < self.epsilon < math.inf)
        for name in ("constant", "rademacher", "gamma_constant", "smoothness", "data_constant"):
            value = getattr(self, name)
            need(name, "a number, 0 or more", value is None or 0 <= value < math.inf)
        for name in ("delta_pos", "delta_neg"):
            value = getattr(self, name)
            need(name, "between 0 and 1", value is None or 0 <= value <= 1)


@dataclass(frozen=True)
class RunFacts:
    """Settings and results of a run.

    Args:
        delta_pos: of its `dp` term, or that term's default.
        delta_neg: likewise.
        reduction: likewise.
        dp_weight: lambda of `dp`; None without one.
        cllr_weight: lambda of `cllr`; None without one.
        alpha: of `cllr`; None without one.
        negatives: n, negatives per anchor of the first batch.
        nce: the last logged loss of its `infonce` term, in nats.
    """

    delta_pos: float = 0.1
    delta_neg: float = 0.5
    reduction: str = "anchor_sum"
    dp_weight: float | None = None
    cllr_weight: float | None = None
    alpha: float | None = None
    negatives: float | None = None
    nce: float | None = None
