"""Arora et al. 2019: the unsupervised loss, the mean classifier's loss, and what binds one by the other.

Everything is a statement about the distribution of the points at hand: D_c is uniform over the points of class c, and
draws are independent and with replacement (x = x+ included). Under it Lemma 4.3, Lemma 4.4, Theorems 4.5 and 6.1 and
Proposition 6.2 hold for whatever features they are evaluated on.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dipole.core.evaluation.theory import polynomials
from dipole.core.evaluation.theory.expectation import (
    Loss,
    Negatives,
    expected,
    integrate,
    no_margin,
    quadrature,
    transform,
)
from dipole.core.evaluation.theory.latent import Latent, collision, full_collision, some_collision
from dipole.core.objectives.options import Range, in_range
from dipole.core.objectives.registry import register
from dipole.core.utils.errors import OptionError


@dataclass(frozen=True)
class Unsupervised:
    """L_un(f) and its parts.

    Attributes:
        whole: L_un.
        different: L_un^!=, over negatives of other classes, given that there is one.
        same: L_un^=, over negatives of the positive's class, given that there is one.
        error: standard error of `whole` if block means were drawn, 0 if it is exact.
    """

    whole: float
    different: float
    same: float
    error: float = 0.0


def unsupervised_loss(points: Latent, loss: str = "hinge", k: int = 1) -> Unsupervised:
    """L_un(f) = E l( { f(x)^T ( f(x+) - f(x_i^-) ) }_{i=1..k} ) and its parts, exactly (Arora et al., Eqs. 4-6, 8).

    (x, x+) from one class c ~ rho, each x_i^- from a class c_i^- ~ rho of its own. The parts keep the negatives whose
    class differs from c, or equals it, and are means over the draws where there is one (App. B.1); for k = 1
    L_un = tau L_un^= + (1 - tau) L_un^!= (Eq. 8).

    Args:
        points: the classes.
        loss: "hinge" or "logistic" (base 2).
        k: negatives, >= 1.
    """
    return _unsupervised(points, points.scores, points.scores, loss, k)


def _unsupervised(points: Latent, plus: Tensor, minus: Tensor, loss: str, k: int) -> Unsupervised:
    """The loss where positives score `plus` and negatives `minus`, both (n, n)."""
    whole = different = same = 0.0
    for rho, span in zip(points.prior.tolist(), points.spans, strict=True):
        inside = torch.zeros_like(points.point_mass)
        inside[span] = points.point_mass[span]
        mass = torch.stack([points.point_mass, points.point_mass - inside, inside])
        means = expected(loss, plus[span, span], minus[span], mass, k).mean(1).tolist()
        whole, different, same = (
            total + rho * mean for total, mean in zip((whole, different, same), means, strict=True)
        )
    left = 1 - full_collision(points.prior, k)
    return Unsupervised(
        whole, different / left if points.classes > 1 else math.nan, same / some_collision(points.prior, k)
    )


def block_loss(points: Latent, loss: str = "hinge", b: int = 2, draws: int = 4, seed: int = 0) -> Unsupervised:
    """L_un^block(f) = E l( f(x)^T ( mean_i f(x_i^+) - mean_i f(x_i^-) ) ), i = 1..b (Arora et al., Eq. 12, one block).

    A block's further members are those of permutations within each class, drawn anew for each of `draws`: every member
    is uniform over its class and independent of the others, as in the formula, and every pair of members is seen
    equally often. So the estimate has no bias, and Proposition 6.2 holds for each draw, not on average only.

    Args:
        points: the classes.
        loss: "hinge" or "logistic" (base 2).
        b: members of a block, >= 1.
        draws: sets of permutations, >= 1. The standard error comes from their spread.
        seed: of the permutations.

    Raises:
        OptionError: b or draws are below 1.
    """
    if b < 1 or draws < 1:
        raise OptionError(f"blocks need b >= 1 and draws >= 1, got {b} and {draws}.", "b")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws if b > 1 else 1):
        plus, minus = (_block_scores(points, b, generator) for _ in range(2))
        found.append(_unsupervised(points, plus, minus, loss, 1))
    wholes = torch.tensor([each.whole for each in found], dtype=torch.double)
    error = float(wholes.std() / math.sqrt(len(wholes))) if len(wholes) > 1 else (math.nan if b > 1 else 0.0)
    return Unsupervised(
        float(wholes.mean()),
        sum(each.different for each in found) / len(found),
        sum(each.same for each in found) / len(found),
        error,
    )


def _block_scores(points: Latent, b: int, generator: torch.Generator) -> Tensor:
    """Scores of every point with the mean of the block that each point begins, (n, n)."""
    total = points.features.clone()
    for _ in range(b - 1):
        order = [torch.randperm(span.stop - span.start, generator=generator) + span.start for span in points.spans]
        total += points.features[torch.cat(order)]
    return points.features @ (total / b).T


def mean_classifier_loss(points: Latent, loss: str = "hinge", k: int = 1, tasks: str = "collision") -> float:
    """L_sup^mu(f): the loss of the classifier whose rows are the class means, averaged over tasks (Def. 2.1, 2.2).

    tasks "collision": classes c, c_1..c_k ~ rho given that c is none of the c_i, the task is the set of those that are
    distinct (Sec. 6.1); "distinct": given that all k + 1 differ (Def. 2.2). For k = 1 the two are the same. Both are
    exact.

    Args:
        points: the classes.
        loss: "hinge" or "logistic" (base 2).
        k: a task has k + 1 classes, k >= 1.
        tasks: "collision" or "distinct", see above.

    Raises:
        OptionError: another word for `tasks`, or too few classes for such a task.
    """
    if tasks not in ("collision", "distinct"):
        raise OptionError(f"unknown tasks {tasks!r}. Allowed: collision, distinct.", "tasks")
    needed = k + 1 if tasks == "distinct" else 2
    if points.classes < needed:
        raise OptionError(f"a task of {needed} classes needs as many, there are {points.classes}.", "k")
    total = weight = 0.0
    scores = points.features @ points.means.T  # (n, C)
    for c, (rho, span) in enumerate(zip(points.prior.tolist(), points.spans, strict=True)):
        other = torch.arange(points.classes) != c
        prior = points.prior[other]
        a, b = scores[span, c : c + 1], scores[span][:, other]
        if tasks == "collision":
            chance = rho * float(prior.sum()) ** k
            value = _over_sets(loss, a, b, prior / prior.sum(), k)
        else:
            chance = rho * float(polynomials.elementary(prior, k))
            value = _over_distinct(loss, a, b, prior, k)
        total, weight = total + chance * float(value.mean()), weight + chance
    return total / weight


def _over_sets(loss: str, a: Tensor, b: Tensor, prior: Tensor, k: int) -> Tensor:
    """E l over the set of distinct classes among k draws, (m,)."""
    if loss == "hinge" or k == 1:  # the largest of a set is the largest of the draws
        return expected(loss, a, b, prior.unsqueeze(0), k)[0]
    parts = []
    for rows in range(0, len(a), _rows_at_once(b)):
        here = slice(rows, rows + _rows_at_once(b))
        nodes = quadrature(a[here], b[here], k)
        all_left = polynomials.draws(prior, transform(b[here], nodes), k)  # E prod over distinct of e^{-w e^b}
        parts.append(integrate(transform(a[here], nodes)[:, 0], 1 - all_left))
    return torch.cat(parts)


def _over_distinct(loss: str, a: Tensor, b: Tensor, prior: Tensor, k: int) -> Tensor:
    """E l over k distinct classes, drawn with probability ~ the product of their shares, (m,)."""
    if k == 1:
        return expected(loss, a, b, (prior / prior.sum()).unsqueeze(0), 1)[0]
    if loss == "hinge":
        values, order = b.sort(dim=1)
        reached = polynomials.elementary_prefixes(prior[order], k) / polynomials.elementary(prior, k)  # (m, n)
        largest = torch.diff(reached, dim=1, prepend=torch.zeros_like(reached[:, :1]))
        return (largest * (1 + values - a).clamp_min(0)).sum(1)
    parts = []
    for rows in range(0, len(a), _rows_at_once(b)):
        here = slice(rows, rows + _rows_at_once(b))
        nodes = quadrature(a[here], b[here], k)
        left = transform(b[here], nodes)  # (m, n, G)
        all_left = polynomials.elementary(prior.view(1, -1, 1) * left, k, dim=1) / polynomials.elementary(prior, k)
        parts.append(integrate(transform(a[here], nodes)[:, 0], 1 - all_left))
    return torch.cat(parts)


def _rows_at_once(b: Tensor) -> int:
    return max(1, (1 << 13) // b.shape[1])


def deviation(points: Latent) -> float:
    """s(f) = E_{c ~ nu} [ sqrt( ||Sigma(f, c)||_2 ) E_{x ~ D_c} ||f(x)|| ], nu(c) ~ rho(c)^2 (Arora et al., Sec. 4.2).

    Sigma is the covariance of f(x) in class c, with divisor n_c. Its norm is the largest eigenvalue.

    Args:
        points: the classes.
    """
    parts = []
    for span in points.spans:
        x = points.features[span]
        spread = torch.linalg.matrix_norm(x - x.mean(0), 2) / math.sqrt(len(x))
        parts.append(spread * torch.linalg.vector_norm(x, dim=1).mean())
    return float((points.squared * torch.stack(parts)).sum())


def radius(points: Latent) -> float:
    """R = max ||f(x)|| (Arora et al., Sec. 2).

    Args:
        points: the classes.
    """
    return float(torch.linalg.vector_norm(points.features, dim=1).max())


def spread(points: Latent) -> float:
    """A sigma with which f(x) is sub-Gaussian in every direction in every class: max_c max_x ||f(x) - mu_c||.

    Hoeffding: a variable in an interval of length 2 r is r-sub-Gaussian. Arora et al. (Sec. 5.2) assume some sigma.

    Args:
        points: the classes.
    """
    centred = points.features - points.means.repeat_interleave(points.counts, 0)
    return float(torch.linalg.vector_norm(centred, dim=1).max())


def collision_constant(loss: str) -> float:
    """c' of Lemma 4.4 and Theorems 4.5 and 6.1: 1/sqrt(2) for hinge, 1/(sqrt(2) ln 2) for logistic.

    The paper leaves it open. l(v) - l(0) <= a sum_i max(0, -v_i) with a = 1 (hinge) or 1/ln 2 (logistic), E max(0, -v)
    = E|v|/2 as v is symmetric given x, and E|v| <= sqrt(2 f(x)^T Sigma f(x)) by Jensen.

    Args:
        loss: "hinge" or "logistic" (base 2).
    """
    return 1 / math.sqrt(2) / (1 if loss == "hinge" else math.log(2))


def generalization(
    R: float, rademacher: float, tuples: float, confidence: float = 0.95, constant: float = 1.0
) -> float:
    """Gen_M = constant ( R Rad_S(F)/M + R^2 sqrt( log(1/delta)/M ) ) (Arora et al., Theorem 4.1).

    The paper gives only the order. `constant` is the factor in its O, and `rademacher` is Rad_S(F), which has no
    formula for networks. Choose both.

    Args:
        R: bound of ||f||.
        rademacher: Rad_S(F), >= 0.
        tuples: M, number of training tuples, > 0.
        confidence: 1 - delta, in (0, 1).
        constant: >= 0.
    """
    return constant * (R * rademacher / tuples + R * R * math.sqrt(-math.log1p(-confidence) / tuples))


def lemma_4_3(unsupervised: float, tau: float) -> float:
    """( L_un - tau )/(1 - tau), at least L_sup^mu (Arora et al., Lemma 4.3; also Prop. 6.2 with L_un^block).

    Args:
        unsupervised: L_un, `Unsupervised.whole`.
        tau: probability that two classes are the same, in [0, 1).
    """
    return (unsupervised - tau) / (1 - tau)


def theorem_4_1(unsupervised: float, tau: float, gen: float) -> float:
    """( L_un - tau + Gen_M )/(1 - tau) (Arora et al., Theorem 4.1).

    Args:
        unsupervised: as in `lemma_4_3`.
        tau: as in `lemma_4_3`.
        gen: Gen_M >= 0, see `generalization`.
    """
    return lemma_4_3(unsupervised, tau) + gen / (1 - tau)


def lemma_4_4(loss: str, s: float) -> float:
    """1 + c' s(f), at least L_un^= (Arora et al., Lemma 4.4).

    Args:
        loss: "hinge" or "logistic" (base 2).
        s: s(f), see `deviation`.
    """
    return 1 + collision_constant(loss) * s


def theorem_4_5(loss: str, different: float, s: float, tau: float, gen: float = 0.0) -> float:
    """L_un^!= + beta s(f) + eta Gen_M, beta = c' tau/(1 - tau), eta = 1/(1 - tau) (Arora et al., Theorem 4.5).

    Args:
        loss: "hinge" or "logistic" (base 2).
        different: L_un^!=, `Unsupervised.different`.
        s: s(f), see `deviation`.
        tau: probability that two classes are the same, in [0, 1).
        gen: Gen_M >= 0.
    """
    return different + collision_constant(loss) * tau / (1 - tau) * s + gen / (1 - tau)


def theorem_6_1(loss: str, k: int, different: float, s: float, prior: Tensor, gen: float = 0.0) -> float:
    """(1 - tau')/(1 - tau_k) L_un^!= + c' k tau/(1 - tau_k) s(f) + Gen_M/(1 - tau_k) (Arora et al., Theorem B.1).

    Args:
        loss: "hinge" or "logistic" (base 2).
        k: negatives, >= 1.
        different: L_un^!= of k negatives.
        s: s(f), see `deviation`.
        prior: (C,) rho, which sums to 1.
        gen: Gen_M >= 0.
    """
    left = 1 - some_collision(prior, k)
    first = (1 - full_collision(prior, k)) / left * different
    return first + collision_constant(loss) * k * collision(prior) / left * s + gen / left


def lemma_4_3_of_k(loss: str, k: int, unsupervised: float, prior: Tensor) -> float:
    """( L_un - tau_k E[ l_t(0) ] )/(1 - tau_k), t > 0 the number of negatives of the positive's class.

    Lemma 4.3 for k negatives, a step of the proof of Theorem B.1; k = 1 is Lemma 4.3.

    Args:
        loss: "hinge" or "logistic" (base 2).
        k: negatives, >= 1.
        unsupervised: L_un of k negatives.
        prior: (C,) rho, which sums to 1.
    """
    collided = 0.0
    for rho in prior.tolist():
        for t in range(1, k + 1):
            chance = math.comb(k, t) * rho**t * (1 - rho) ** (k - t)
            collided += rho * chance * float(no_margin(loss, torch.tensor(float(t), dtype=torch.double)))
    return (unsupervised - collided) / (1 - some_collision(prior, k))


def proposition_6_2(block: float, unsupervised: float, tau: float) -> tuple[float, float]:
    """( L_un^block - tau )/(1 - tau) <= ( L_un - tau )/(1 - tau), both at least L_sup^mu (Arora et al., Prop. 6.2).

    Args:
        block: L_un^block, see `block_loss`.
        unsupervised: L_un.
        tau: probability that two classes are the same, in [0, 1).

    Returns:
        Both sides.
    """
    return lemma_4_3(block, tau), lemma_4_3(unsupervised, tau)


def margin(R: float, sigma: float, epsilon: float = 0.1, constant: float | None = None) -> float:
    """gamma = 1 + c' R sigma sqrt( log(R/eps) ) (Arora et al., Lemma 5.1).

    The paper leaves c' open. Without one, gamma = 1 + 2 R sigma sqrt( log( sqrt(pi) R sigma/eps ) ), with which the
    lemma is proved here: -v exceeds its mean by more than gamma - 1 by at most eps in expectation, as
    f(x)^T(f(x+) - f(x-)) has 2 R^2 sigma^2-sub-Gaussian noise given x. A log below 0 counts as 0.

    Args:
        R: bound of ||f||, >= 0.
        sigma: sub-Gaussian constant, see `spread`.
        epsilon: > 0.
        constant: c' >= 0, or None.

    Raises:
        OptionError: `epsilon` is not above 0.
    """
    if epsilon <= 0:
        raise OptionError(f"epsilon must be above 0, got {epsilon:g}.", "epsilon")
    if constant is None:
        inner, factor = math.sqrt(math.pi) * R * sigma / epsilon, 2.0
    else:
        inner, factor = R / epsilon, constant
    return 1 + factor * R * sigma * math.sqrt(math.log(inner) if inner > 1 else 0.0)


def lemma_5_1(points: Latent, gamma: float, epsilon: float = 0.1) -> float:
    """gamma L_{gamma,sup}^mu + eps, at least the hinge L_un^!= (Arora et al., Lemma 5.1); hinge max(0, 1 - v/gamma).

    Args:
        points: the classes, two at least.
        gamma: > 0, see `margin`.
        epsilon: as of `margin`.

    Raises:
        OptionError: there is only one class.
    """
    return gamma * mean_classifier_loss(points.scaled(gamma**-0.5), "hinge") + epsilon


@register(
    "unsupervised_loss",
    kind="diagnostic",
    formula="L_un = E l( { f(x)^T ( f(x+) - f(x_i^-) ) }_{i=1..k} ), exact over the points at hand",
    source="Arora et al. 2019, Eqs. 4-6",
    cost="n^2 log n (hinge), n^2 times some hundred nodes (logistic)",
)
@in_range
def unsupervised(features: Tensor, labels: Tensor, loss: Loss = "hinge", k: Negatives = 1) -> float:
    """The loss of a positive and k negatives drawn by class, with collisions, exactly.

    Args:
        features: (n, d), not normalised.
        labels: (n,) classes; negative means none.
        loss: "hinge" or "logistic" (base 2).
        k: negatives, >= 1.

    Raises:
        DataError: nothing is labelled, or a number is not finite or too large.
        OptionError: an option is out of its range.
    """
    return unsupervised_loss(Latent.of(features, labels), loss, k).whole


@register(
    "mean_classifier_loss",
    kind="diagnostic",
    formula="L_sup^mu = E l( { f(x)^T ( mu_c - mu_c_i ) }_{i=1..k} ), exact over tasks",
    source="Arora et al. 2019, Def. 2.1, 2.2",
    cost="n C",
)
@in_range
def mean_classifier(features: Tensor, labels: Tensor, loss: Loss = "hinge", k: Negatives = 1) -> float:
    """The loss of the classifier of class means on tasks of k + 1 classes, at most what the unsupervised loss allows.

    Args:
        features: (n, d), not normalised.
        labels: (n,) classes, two at least; negative means none.
        loss: "hinge" or "logistic" (base 2).
        k: as in `unsupervised`.

    Raises:
        DataError: as `unsupervised`.
        OptionError: an option is out of its range, or there is one class alone.
    """
    return mean_classifier_loss(Latent.of(features, labels), loss, k)


@register(
    "intraclass_deviation",
    kind="diagnostic",
    formula="s(f) = E_{c ~ nu} [ sqrt( ||Sigma(f, c)||_2 ) E_{x ~ D_c} ||f(x)|| ]",
    source="Arora et al. 2019, Sec. 4.2",
    cost="one singular value per class",
)
def intraclass_deviation(features: Tensor, labels: Tensor) -> float:
    """How far classes are spread (`deviation`): what a negative of the positive's own class costs.

    Args:
        features: (n, d), not normalised.
        labels: (n,) classes; negative means none.

    Raises:
        DataError: as `unsupervised`.
    """
    return deviation(Latent.of(features, labels))


@register(
    "class_collision",
    kind="diagnostic",
    formula="tau_k = 1 - sum_c rho(c) (1 - rho(c))^k; tau = sum_c rho(c)^2 for k = 1",
    source="Arora et al. 2019, Sec. 4.1, 6.1",
    cost="none",
)
@in_range
def class_collision(labels: Tensor, k: Annotated[int, Range(at_least=1), "negatives"] = 1) -> float:
    """Probability that one of k negatives is of the positive's class; nan without labels.

    Args:
        labels: (n,) classes; negative means none.
        k: negatives, >= 1.

    Raises:
        OptionError: `k` is out of its range.
    """
    counts = labels[labels >= 0].unique(return_counts=True)[1].double()
    return some_collision(counts / counts.sum(), k) if len(counts) else math.nan
