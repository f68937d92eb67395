"""The theorems of the papers as data, their options, and the facts of a run that they use. Loads no torch."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from dipole.core.objectives.spec import Range, checked, options_of
from dipole.core.utils.errors import OptionError

LOSSES = ("hinge", "logistic")
Count = Range(at_least=1)
Constant = Range(at_least=0)
Share = Range(at_least=0, at_most=1)
ARORA, LMCL, CLLR = "Arora et al. 2019", "LMCL", "CLLR"


@dataclass(frozen=True)
class Theorem:
    """One statement of a paper.

    Attributes:
        paper: "Arora et al. 2019", "LMCL" or "CLLR".
        name: as the paper calls it, such as "Lemma 4.3".
        key: its rows in `dipole theory RUN` and in its JSON.
        needs: what a run must have for it: "features", "labels", "metrics" (of training).
        always: whether the measured sides satisfy it on any features.
        statement: what is proved, in ASCII.
        functions: dotted names of the functions that compute it, below `dipole.core.evaluation`.
        assumption: under what it is proved, beyond what is measured.
        free: constants that the paper does not give, and that are options here.
        run: how to run it.
    """

    paper: str
    name: str
    key: str
    needs: tuple[str, ...]
    always: bool
    statement: str
    functions: tuple[str, ...]
    assumption: str = ""
    free: tuple[str, ...] = ()
    run: str = "dipole theory RUN"


FEATURES, LABELS = ("features",), ("features", "labels")
GEN_M = ("constant", "rademacher")
OF_GEN_M = "dipole theory RUN --delta 0.05 --constant 1 --rademacher 0"

# fmt: off
THEOREMS: tuple[Theorem, ...] = (
    Theorem(ARORA, "Theorem 4.1", "theorem_4_1", LABELS, True,
            "L_sup^mu(f) <= ( L_un(f) - tau + Gen_M ) / (1 - tau) with probability 1 - delta",
            ("theory.arora.lemma_4_3", "theory.arora.generalization"),
            "measured for the trained f itself on the points at hand, where Gen_M >= 0 is only added", GEN_M, OF_GEN_M),
    Theorem(ARORA, "Lemma 4.3", "lemma_4_3", LABELS, True,
            "L_sup^mu(f) <= ( L_un(f) - tau ) / (1 - tau)", ("theory.arora.lemma_4_3",)),
    Theorem(ARORA, "Lemma 4.4", "lemma_4_4", LABELS, True,
            "L_un^=(f) - 1 <= c' s(f), c' = 1/sqrt(2) (hinge) or 1/(sqrt(2) ln 2) (logistic)",
            ("theory.arora.lemma_4_4", "theory.arora.collision_constant")),
    Theorem(ARORA, "Theorem 4.5", "theorem_4_5", LABELS, True,
            "L_sup(f) <= L_sup^mu(f) <= L_un^!=(f) + c' tau/(1 - tau) s(f) + Gen_M/(1 - tau)",
            ("theory.arora.theorem_6_1",), free=GEN_M),
    Theorem(ARORA, "Lemma 5.1", "lemma_5_1", LABELS, True,
            "L_un^!=(f) <= gamma L_{gamma,sup}^mu(f) + eps, gamma = 1 + c' R sigma sqrt(log(R/eps)) (hinge)",
            ("theory.arora.lemma_5_1", "theory.arora.margin"),
            "the c' derived here; with another c' it is the reader's", ("gamma_constant", "epsilon"),
            "dipole theory RUN --epsilon 0.1"),
    Theorem(ARORA, "Theorem 6.1 (B.1)", "theorem_6_1", LABELS, True,
            "L_sup^mu(f) <= (1 - tau')/(1 - tau_k) L_un^!=(f) + c' k tau/(1 - tau_k) s(f) + Gen_M/(1 - tau_k)",
            ("theory.arora.theorem_6_1",), free=GEN_M, run="dipole theory RUN --k 4"),
    Theorem(ARORA, "Proposition 6.2", "proposition_6_2", LABELS, True,
            "L_sup^mu(f) <= ( L_un^block(f) - tau )/(1 - tau) <= ( L_un(f) - tau )/(1 - tau)",
            ("theory.arora.block_loss", "theory.arora.lemma_4_3"), run="dipole theory RUN --block 5"),
    Theorem(ARORA, "Figure 1 (Section 5.1)", "figure_1", (), True,
            "a small min_f L_sup does not make the f that minimises L_un good: two distributions where it fails",
            ("theory.pictures.mean_is_bad", "theory.pictures.high_variance"),
            run="dipole theory --figure1 PICTURE.svg"),
    Theorem(LMCL, "Eq. 5", "lmcl_eq_5", FEATURES, True,
            "mean of D_ij over pairs <= N/(2N - 2)",
            ("diagnostics.mean_distance", "diagnostics.mean_distance_ceiling")),
    Theorem(LMCL, "Theorem 1", "lmcl_theorem_1", FEATURES, False,
            "for each mu in [0, 1] and eps there is an N with min_{i<j} |D_ij - mu| < eps", ("theory.lmcl.coverage",),
            "f minimises L_NCE and N is large; measured: the eps that the points reach"),
    Theorem(LMCL, "Theorem 2", "lmcl_theorem_2", LABELS, False,
            "some f has max D within classes <= 1/2 - tau < 1/2 <= min D between classes, if C < d",
            ("theory.lmcl.separation",),
            "says that such an f exists (f(x) = e_y); measured: whether C < d, and both distances of this f"),
    Theorem(LMCL, "Theorem 3", "lmcl_theorem_3", LABELS, False,
            "similarity error <= (delta- - delta+) R1 + (K_max/K_min)/C "
            "<= 4 (delta- - delta+)/lambda + (K_max/K_min)/C",
            ("diagnostics.similarity_error", "theory.lmcl.regularizer"),
            "f minimises L_NCE + lambda R1, and delta+ is the distance that as many pairs fall below as share a class",
            run="dipole theory RUN --delta-pos 0.1 --delta-neg 0.5"),
    Theorem(LMCL, "Theorem 4", "lmcl_theorem_4", LABELS, False,
            "|L_SM - L_NCE| <= O( Q1 Rad_H(lambda)/N + sqrt(Q2/N) ), Q1 = sqrt(1 + 1/n), Q2 = log(1/delta) log^2(n)",
            ("theory.lmcl.generalization",),
            "f minimises L_NCE + lambda R1; the O hides a constant, and Rad_H(lambda) has no number", GEN_M, OF_GEN_M),
    Theorem(CLLR, "Theorem 1", "cllr_theorem_1", FEATURES, False,
            "lim_H var[ D/E(D) ] = 0 and P{ lim_H (D_max - D_min)/D_min = 0 } = 1",
            ("diagnostics.min_max_ratio", "theory.cllr.relative_variance"),
            "H grows without bound and points are independent of f; measured: both numbers at this H"),
    Theorem(CLLR, "Theorem 2", "cllr_theorem_2", ("metrics",), False,
            "min_t E||grad F||^2 <= delta sqrt( 2 S (F_0 - F*)/T )", ("theory.cllr.stationarity",),
            "SGD with the rate of the theorem, from an L-smooth F with gradients below delta; S is free",
            ("smoothness",), "dipole theory RUN --smoothness 1"),
    Theorem(CLLR, "Theorem 3", "cllr_theorem_3", FEATURES, False,
            "P{ (D_max - D_min)/D_min >= alpha lambda C(X) } = 1",
            ("diagnostics.min_max_ratio", "theory.cllr.implied_constant"),
            "f and L minimise Eq. 8; C(X) has no formula: measured is the largest that the points allow",
            ("data_constant",), "dipole theory RUN --data-constant 1"),
)
# fmt: on


@dataclass(frozen=True)
class Choices:
    """Options of `dipole theory`. The options after `delta_neg` are constants that no paper gives.

    Args:
        losses: of Arora's theorems: "hinge", "logistic" or both.

    Raises:
        OptionError: one of them is out of its range.
    """

    losses: tuple[str, ...] = LOSSES
    k: Annotated[int, Count, "negatives of Theorem 6.1"] = 4
    block: Annotated[int, Count, "members of a block of Proposition 6.2"] = 5
    draws: Annotated[int, Count, "sets of permutations that blocks are averaged over"] = 4
    tasks: Annotated[int, Range(at_least=2), "fitted tasks of the trained classifier"] = 50
    points: Annotated[int, Range(at_least=2), "largest number of points"] = 1000
    prior: Annotated[Literal["measured", "uniform"], "class prior rho"] = "measured"
    confidence: Annotated[float, Range(above=0, below=1), "1 - delta of the bounds that hold with a probability"] = 0.95
    seed: Annotated[int, Range(at_least=0), "seed of drawn points, tasks and blocks"] = 0
    epsilon: Annotated[float, Range(above=0), "eps of Lemma 5.1"] = 0.1
    mu: Annotated[float | None, Range(above=-math.inf), "slack of Theorem 3 (default: half the margin)"] = None
    delta_pos: Annotated[float | None, Share, "lower end of the margin (default: the run's, or 0.1)"] = None
    delta_neg: Annotated[float | None, Share, "upper end of the margin (default: the run's, or 0.5)"] = None
    constant: Annotated[float, Constant, "constant in the O of Gen_M"] = 1.0
    rademacher: Annotated[float, Constant, "complexity of the class; 0 leaves it out"] = 0.0
    tuples: Annotated[int | None, Count, "M of Gen_M (default: the number of points)"] = None
    gamma_constant: Annotated[float | None, Constant, "c' of Lemma 5.1 (default: the one derived in the docs)"] = None
    smoothness: Annotated[float, Constant, "S of CLLR Theorem 2"] = 1.0
    data_constant: Annotated[float, Constant, "C(X) of CLLR Theorem 3"] = 1.0

    def __post_init__(self) -> None:
        if not self.losses or not set(self.losses) <= set(LOSSES):
            raise OptionError(f"losses must be of {', '.join(LOSSES)}, got {self.losses}.", "losses")
        options = options_of(Choices)
        checked("theory", options, {option.name: getattr(self, option.name) for option in options})


@dataclass(frozen=True)
class RunFacts:
    """Settings and results of a run."""

    delta_pos: float = 0.1  # of its `dp` term, or that term's default
    delta_neg: float = 0.5  # likewise
    reduction: str = "mean"  # likewise
    dp_weight: float | None = None  # lambda of `dp`; None without one
    cllr_weight: float | None = None  # lambda of `cllr`; None without one
    alpha: float | None = None  # of `cllr`; None without one
    negatives: float | None = None  # n, negatives per anchor of the first batch
    nce: float | None = None  # the last logged loss of its `infonce` term, in nats
