"""The theorems of the papers as data: statement, functions that compute it, and requirements. Loads no torch."""

from dataclasses import dataclass
from typing import Literal

ARORA, LMCL, CLLR = "Arora et al. 2019", "LMCL", "CLLR"


@dataclass(frozen=True)
class Theorem:
    """One statement of a paper.

    Attributes:
        paper: "Arora et al. 2019", "LMCL" or "CLLR".
        name: as the paper calls it, such as "Lemma 4.3".
        statement: what is proved, in ASCII.
        functions: dotted names of the functions that compute it, below `dipole.core.evaluation.theory` unless absolute.
        key: its rows in `dipole theory RUN` and in its JSON.
        needs: what a run must have for it: "features", "labels", "metrics" (of training).
        always: whether the measured sides satisfy it on any features; otherwise it asks for what `assumption` says.
        assumption: under what it is proved, beyond what is measured.
        free: constants that the paper does not give, and that are options here.
        run: how to run it.
    """

    paper: str
    name: str
    statement: str
    functions: tuple[str, ...]
    key: str
    needs: tuple[Literal["features", "labels", "metrics"], ...]
    always: bool
    assumption: str = ""
    free: tuple[str, ...] = ()
    run: str = "dipole theory RUN"


THEOREMS: tuple[Theorem, ...] = (
    Theorem(
        ARORA,
        "Theorem 4.1",
        "L_sup^mu(f) <= ( L_un(f) - tau + Gen_M ) / (1 - tau) with probability 1 - delta",
        ("arora.theorem_4_1", "arora.generalization"),
        "theorem_4_1",
        ("features", "labels"),
        always=True,
        assumption="measured for the trained f itself on the points at hand, where Gen_M >= 0 is only added",
        free=("constant", "rademacher"),
        run="dipole theory RUN --delta 0.05 --constant 1 --rademacher 0",
    ),
    Theorem(
        ARORA,
        "Lemma 4.3",
        "L_sup^mu(f) <= ( L_un(f) - tau ) / (1 - tau)",
        ("arora.lemma_4_3",),
        "lemma_4_3",
        ("features", "labels"),
        always=True,
    ),
    Theorem(
        ARORA,
        "Lemma 4.4",
        "L_un^=(f) - 1 <= c' s(f), c' = 1/sqrt(2) (hinge) or 1/(sqrt(2) ln 2) (logistic)",
        ("arora.lemma_4_4", "arora.collision_constant"),
        "lemma_4_4",
        ("features", "labels"),
        always=True,
    ),
    Theorem(
        ARORA,
        "Theorem 4.5",
        "L_sup(f) <= L_sup^mu(f) <= L_un^!=(f) + c' tau/(1 - tau) s(f) + Gen_M/(1 - tau)",
        ("arora.theorem_4_5",),
        "theorem_4_5",
        ("features", "labels"),
        always=True,
        free=("constant", "rademacher"),
    ),
    Theorem(
        ARORA,
        "Lemma 5.1",
        "L_un^!=(f) <= gamma L_{gamma,sup}^mu(f) + eps, gamma = 1 + c' R sigma sqrt(log(R/eps)) (hinge)",
        ("arora.lemma_5_1", "arora.margin"),
        "lemma_5_1",
        ("features", "labels"),
        always=True,
        assumption="the c' derived here; with another c' it is the reader's",
        free=("gamma_constant", "epsilon"),
        run="dipole theory RUN --epsilon 0.1",
    ),
    Theorem(
        ARORA,
        "Theorem 6.1 (B.1)",
        "L_sup^mu(f) <= (1 - tau')/(1 - tau_k) L_un^!=(f) + c' k tau/(1 - tau_k) s(f) + Gen_M/(1 - tau_k)",
        ("arora.theorem_6_1",),
        "theorem_6_1",
        ("features", "labels"),
        always=True,
        free=("constant", "rademacher"),
        run="dipole theory RUN --k 4",
    ),
    Theorem(
        ARORA,
        "Proposition 6.2",
        "L_sup^mu(f) <= ( L_un^block(f) - tau )/(1 - tau) <= ( L_un(f) - tau )/(1 - tau)",
        ("arora.proposition_6_2",),
        "proposition_6_2",
        ("features", "labels"),
        always=True,
        run="dipole theory RUN --block 5",
    ),
    Theorem(
        ARORA,
        "Figure 1 (Section 5.1)",
        "a small min_f L_sup does not make the f that minimises L_un good: two distributions where it fails",
        ("counterexamples.mean_is_bad", "counterexamples.high_variance"),
        "figure_1",
        (),
        always=True,
        run="dipole theory --figure1 PICTURE.svg",
    ),
    Theorem(
        LMCL,
        "Eq. 5",
        "mean of D_ij over pairs <= N/(2N - 2)",
        (
            "dipole.core.evaluation.diagnostics.mean_distance",
            "dipole.core.evaluation.diagnostics.mean_distance_ceiling",
        ),
        "lmcl_eq_5",
        ("features",),
        always=True,
    ),
    Theorem(
        LMCL,
        "Theorem 1",
        "for each mu in [0, 1] and eps there is an N with min_{i<j} |D_ij - mu| < eps",
        ("lmcl.coverage",),
        "lmcl_theorem_1",
        ("features",),
        always=False,
        assumption="f minimises L_NCE and N is large; measured: the eps that the points reach",
    ),
    Theorem(
        LMCL,
        "Theorem 2",
        "some f has max D within classes <= 1/2 - tau < 1/2 <= min D between classes, if C < d",
        ("lmcl.separation",),
        "lmcl_theorem_2",
        ("features", "labels"),
        always=False,
        assumption="says that such an f exists (f(x) = e_y); measured: whether C < d, and both distances of this f",
    ),
    Theorem(
        LMCL,
        "Theorem 3",
        "similarity error <= (delta- - delta+) R1 + (K_max/K_min)/C <= 4 (delta- - delta+)/lambda + (K_max/K_min)/C",
        ("dipole.core.evaluation.diagnostics.similarity_error", "lmcl.polarization_bound"),
        "lmcl_theorem_3",
        ("features", "labels"),
        always=False,
        assumption="f minimises L_NCE + lambda R1, and delta+ is the distance that as many pairs fall below as share a "
        "class",
        run="dipole theory RUN --delta-pos 0.1 --delta-neg 0.5",
    ),
    Theorem(
        LMCL,
        "Theorem 4",
        "|L_SM - L_NCE| <= O( Q1 Rad_H(lambda)/N + sqrt(Q2/N) ), Q1 = sqrt(1 + 1/n), Q2 = log(1/delta) log^2(n)",
        ("lmcl.generalization",),
        "lmcl_theorem_4",
        ("features", "labels"),
        always=False,
        assumption="f minimises L_NCE + lambda R1; the O hides a constant, and Rad_H(lambda) has no number",
        free=("constant", "rademacher"),
        run="dipole theory RUN --delta 0.05 --constant 1 --rademacher 0",
    ),
    Theorem(
        CLLR,
        "Theorem 1",
        "lim_H var[ D/E(D) ] = 0 and P{ lim_H (D_max - D_min)/D_min = 0 } = 1",
        ("dipole.core.evaluation.diagnostics.min_max_ratio", "cllr.relative_variance"),
        "cllr_theorem_1",
        ("features",),
        always=False,
        assumption="H grows without bound and points are independent of f; measured: both numbers at this H",
    ),
    Theorem(
        CLLR,
        "Theorem 2",
        "min_t E||grad F||^2 <= delta sqrt( 2 S (F_0 - F*)/T )",
        ("cllr.stationarity",),
        "cllr_theorem_2",
        ("metrics",),
        always=False,
        assumption="SGD with the rate of the theorem, from an L-smooth F with gradients below delta; S is free",
        free=("smoothness",),
        run="dipole theory RUN --smoothness 1",
    ),
    Theorem(
        CLLR,
        "Theorem 3",
        "P{ (D_max - D_min)/D_min >= alpha lambda C(X) } = 1",
        ("dipole.core.evaluation.diagnostics.min_max_ratio", "cllr.implied_constant"),
        "cllr_theorem_3",
        ("features",),
        always=False,
        assumption="f and L minimise Eq. 8; C(X) has no formula: measured is the largest that the points allow",
        free=("data_constant",),
        run="dipole theory RUN --data-constant 1",
    ),
)
