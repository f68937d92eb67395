"""Arora et al. 2019: the unsupervised loss, that of the mean and of the trained classifier, and what binds them.

Everything is a statement about the distribution of the points at hand: D_c is uniform over the points of class c, and
draws are independent and with replacement (x = x+ included). Under it Lemma 4.3, Lemma 4.4, Theorems 4.5 and 6.1 and
Proposition 6.2 hold for whatever features they are evaluated on. A loss is "hinge" or "logistic" (base 2).
"""

import math
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from dipole.core.evaluation.arrays import Array, as_classes, diagnostic
from dipole.core.evaluation.theory import latent
from dipole.core.evaluation.theory.latent import Latent, Loss, Negatives
from dipole.core.utils.errors import OptionError

SMOOTHING = (1.0, 0.3, 0.1, 0.03)
"""The hinge is minimised through max(0, u) ~ s log(1 + e^{u/s}) with these s, one after the other."""


class Unsupervised(NamedTuple):
    """L_un(f) and its parts."""

    whole: float  # L_un
    different: float  # L_un^!=, over negatives of other classes, given that there is one
    same: float  # L_un^=, over negatives of the positive's class, given that there is one
    error: float = 0.0  # standard error of `whole` if block means were drawn, 0 if it is exact


def unsupervised_loss(points: Latent, loss: str = "hinge", k: int = 1) -> Unsupervised:
    """L_un(f) = E l( { f(x)^T ( f(x+) - f(x_i^-) ) }_{i=1..k} ) and its parts, exactly (Arora et al., Eqs. 4-6, 8).

    (x, x+) from one class c ~ rho, each x_i^- from a class c_i^- ~ rho of its own. The parts keep the negatives whose
    class differs from c, or equals it, and are means over the draws where there is one (App. B.1); for k = 1
    L_un = tau L_un^= + (1 - tau) L_un^!= (Eq. 8).
    """
    return _unsupervised(points, points.scores, points.scores, loss, k)


def _unsupervised(points: Latent, plus: Tensor, minus: Tensor, loss: str, k: int) -> Unsupervised:
    """The loss where positives score `plus` and negatives `minus`, both (n, n)."""
    total = torch.zeros(3, dtype=torch.double)
    for rho, span in zip(points.prior.tolist(), points.spans, strict=True):
        inside = torch.zeros_like(points.point_mass)
        inside[span] = points.point_mass[span]
        mass = torch.stack([points.point_mass, points.point_mass - inside, inside])
        total += rho * latent.expected(loss, plus[span, span], minus[span], mass, k).mean(1)
    whole, different, same = total.tolist()
    left = 1 - latent.collision(points.prior, k) or math.nan  # nan: no other classes
    return Unsupervised(whole, different / left, same / latent.some_collision(points.prior, k))


def block_loss(points: Latent, loss: str = "hinge", b: int = 2, draws: int = 4, seed: int = 0) -> Unsupervised:
    """L_un^block(f) = E l( f(x)^T ( mean_i f(x_i^+) - mean_i f(x_i^-) ) ), i = 1..b (Arora et al., Eq. 12, one block).

    Each of `draws` permutes the points within each class, so every pair of members is seen equally often. The estimate
    has no bias, and Proposition 6.2 holds for each draw. Raises OptionError for b or draws below 1.
    """
    if b < 1 or draws < 1:
        raise OptionError(f"blocks need b >= 1 and draws >= 1, got {b} and {draws}.", "b")
    if b == 1:
        return unsupervised_loss(points, loss)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        plus, minus = (_block_scores(points, b, generator) for _ in range(2))
        found.append(_unsupervised(points, plus, minus, loss, 1))
    values = torch.tensor(found, dtype=torch.double)[:, :3]
    error = float(values[:, 0].std() / math.sqrt(draws)) if draws > 1 else math.nan
    whole, different, same = values.mean(0).tolist()
    return Unsupervised(whole, different, same, error)


def _block_scores(points: Latent, b: int, generator: torch.Generator) -> Tensor:
    """Scores of every point with the mean of the block that each point begins, (n, n)."""
    total = points.features.clone()
    for _ in range(b - 1):
        order = [torch.randperm(span.stop - span.start, generator=generator) + span.start for span in points.spans]
        total += points.features[torch.cat(order)]
    return points.features @ (total / b).T


def mean_classifier_loss(points: Latent, loss: str = "hinge", k: int = 1, tasks: str = "collision") -> float:
    """L_sup^mu(f): the loss of the classifier whose rows are the class means, averaged over tasks (Def. 2.1, 2.2).

    tasks "collision": classes c, c_1..c_k ~ rho given that c is none of the c_i. A task is the set of the distinct ones
    (Sec. 6.1). "distinct": given that all k + 1 differ (Def. 2.2). Both are exact. Raises OptionError for another word
    or too few classes.
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
            chance = rho * float(latent.elementary(prior, k)[-1])
            value = _over_distinct(loss, a, b, prior, k)
        total, weight = total + chance * float(value.mean()), weight + chance
    return total / weight


def _over_sets(loss: str, a: Tensor, b: Tensor, prior: Tensor, k: int) -> Tensor:
    """E l over the set of distinct classes among k draws, (m,)."""
    if loss == "hinge" or k == 1:  # the largest of a set is the largest of the draws
        return latent.expected(loss, a, b, prior.unsqueeze(0), k)[0]
    return _integrated(a, b, k, lambda left: latent.over_draws(prior, left, k))


def _over_distinct(loss: str, a: Tensor, b: Tensor, prior: Tensor, k: int) -> Tensor:
    """E l over k distinct classes, drawn with probability ~ the product of their shares, (m,)."""
    if k == 1:
        return _over_sets(loss, a, b, prior / prior.sum(), 1)
    if loss == "hinge":
        values, order = b.sort(dim=1)
        reached = latent.elementary(prior[order], k) / latent.elementary(prior, k)[-1]  # (m, n)
        largest = torch.diff(reached, dim=1, prepend=torch.zeros_like(reached[:, :1]))
        return (largest * (1 + values - a).clamp_min(0)).sum(1)
    shares = prior.view(1, -1, 1)
    return _integrated(
        a, b, k, lambda left: latent.elementary(shares * left, k, 1)[:, -1] / latent.elementary(prior, k)[-1]
    )


def _integrated(a: Tensor, b: Tensor, k: int, over: Callable[[Tensor], Tensor]) -> Tensor:
    """E of the logistic loss, (m,), where `over` takes e^{-w e^b} (m, n, G) to the mean of its product over a set."""
    parts = []
    rows = max(1, (1 << 13) // b.shape[1])
    for own, others in zip(a.split(rows), b.split(rows), strict=True):
        nodes = latent.quadrature(own, others, k)
        parts.append(latent.integrate(latent.transform(own, nodes)[:, 0], 1 - over(latent.transform(others, nodes))))
    return torch.cat(parts)


class Supervised(NamedTuple):
    """L_sup(f) over tasks of k + 1 classes."""

    loss: float  # the mean over all tasks
    error: float  # standard error from the choice of tasks; 0 if all were fitted
    tasks: int  # number of tasks that were fitted
    of: int  # number of tasks there are


def trained_loss(points: Latent, loss: str = "hinge", k: int = 1, tasks: int = 50, seed: int = 0) -> Supervised:
    """L_sup(f) = E_T inf_W L_sup(T, W f) over tasks of k + 1 distinct classes (Arora et al., Eq. 3, Def. 2.2).

    Use all tasks if there are at most `tasks`, else draw as many. The search starts at the mean classifier, so the
    result on each task lies between the infimum and the mean classifier's loss.
    """
    count = math.comb(points.classes, k + 1)
    every = count <= tasks
    chosen = list(combinations(range(points.classes), k + 1)) if every else _draw_tasks(points.prior, k, tasks, seed)
    both = torch.tensor([_losses(points, task, loss) for task in chosen], dtype=torch.double)  # (tasks, 2)
    mean = mean_classifier_loss(points, loss, k, "distinct")
    if every:
        weights = torch.tensor([float(points.prior[list(task)].prod()) for task in chosen], dtype=torch.double)
        return Supervised(float((weights * both[:, 1]).sum() / weights.sum()), 0.0, count, count)
    gains = both[:, 0] - both[:, 1]
    # The mean classifier's loss over all tasks is known, so that it is a control variate. Take the steadier estimate.
    controlled = mean - float(gains.mean()), float(gains.std())
    plain = float(both[:, 1].mean()), float(both[:, 1].std())
    found, spread = min(controlled, plain, key=lambda each: each[1])
    return Supervised(min(max(0.0, found), mean), spread / math.sqrt(len(chosen)), len(chosen), count)


def _draw_tasks(prior: Tensor, k: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Sets of k + 1 classes with probability ~ the product of their shares, class by class."""
    shares, size = prior.tolist(), k + 1
    # left[i][m] is e_m of the classes from i on.
    left = [[1.0] + [0.0] * size]
    for share in reversed(shares):
        left.insert(0, [1.0] + [left[0][m] + share * left[0][m - 1] for m in range(1, size + 1)])
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        task: list[int] = []
        for i, share in enumerate(shares):
            need = size - len(task)
            if need and float(torch.rand((), generator=generator)) * left[i][need] < share * left[i + 1][need - 1]:
                task.append(i)
        found.append(tuple(task))
    return found


def _losses(points: Latent, task: tuple[int, ...], loss: str) -> tuple[float, float]:
    """Loss of the mean classifier and of the best classifier found on one task."""
    counts = points.counts[list(task)]
    x = torch.cat([points.features[points.spans[c]] for c in task])  # (m, d)
    y = torch.arange(len(task)).repeat_interleave(counts)
    weight = (1 / (counts * len(task))).double().repeat_interleave(counts)
    start = points.means[list(task)]
    best = before = float(weight @ latent.margin_loss(loss, _margins(x @ start.T, y)))
    W = start.clone().requires_grad_()
    for smooth in SMOOTHING if loss == "hinge" else SMOOTHING[:1]:
        _minimise(W, x, y, weight, loss, smooth)
        now = float(weight @ latent.margin_loss(loss, _margins(x @ W.detach().T, y)))
        if math.isfinite(now):
            best = min(best, now)
    return before, best


def _margins(scores: Tensor, y: Tensor) -> Tensor:
    """g(x)_y - g(x)_c of the other classes c, (m, k)."""
    own = scores.gather(1, y.unsqueeze(1))
    other = torch.ones_like(scores, dtype=torch.bool).scatter_(1, y.unsqueeze(1), False)
    return own - scores[other].view(len(scores), -1)


def _minimise(W: Tensor, x: Tensor, y: Tensor, weight: Tensor, loss: str, smooth: float) -> None:
    optimizer = torch.optim.LBFGS([W], max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        v = _margins(x @ W.T, y)
        if loss == "hinge":
            reach = torch.cat([torch.zeros_like(v[:, :1]), 1 - v], 1)
            each = smooth * torch.logsumexp(reach / smooth, 1)
        else:
            each = latent.margin_loss(loss, v)
        value = weight @ each
        value.backward()
        return value

    optimizer.step(closure)


def deviation(points: Latent) -> float:
    """s(f) = E_{c ~ nu} [ sqrt( ||Sigma(f, c)||_2 ) E_{x ~ D_c} ||f(x)|| ], nu(c) ~ rho(c)^2 (Arora et al., Sec. 4.2).

    Sigma is the covariance of f(x) in class c, with divisor n_c. Its norm is the largest eigenvalue.
    """
    parts = []
    for span in points.spans:
        x = points.features[span]
        spread = torch.linalg.matrix_norm(x - x.mean(0), 2) / math.sqrt(len(x))
        parts.append(spread * torch.linalg.vector_norm(x, dim=1).mean())
    nu = points.prior.square() / points.prior.square().sum()
    return float((nu * torch.stack(parts)).sum())


def radius(points: Latent) -> float:
    """R = max ||f(x)|| (Arora et al., Sec. 2)."""
    return float(torch.linalg.vector_norm(points.features, dim=1).max())


def spread(points: Latent) -> float:
    """A sigma with which f(x) is sub-Gaussian in every direction in every class: max_c max_x ||f(x) - mu_c||.

    Hoeffding: a variable in an interval of length 2 r is r-sub-Gaussian. Arora et al. (Sec. 5.2) assume some sigma.
    """
    centred = points.features - points.means.repeat_interleave(points.counts, 0)
    return float(torch.linalg.vector_norm(centred, dim=1).max())


def collision_constant(loss: str) -> float:
    """c' of Lemma 4.4 and Theorems 4.5 and 6.1: 1/sqrt(2) for hinge, 1/(sqrt(2) ln 2) for logistic.

    The paper leaves it open. l(v) - l(0) <= a sum_i max(0, -v_i) with a = 1 (hinge) or 1/ln 2 (logistic), E max(0, -v)
    = E|v|/2 as v is symmetric given x, and E|v| <= sqrt(2 f(x)^T Sigma f(x)) by Jensen.
    """
    steepness = {"hinge": 1.0, "logistic": 1 / math.log(2)}
    return steepness[loss] / math.sqrt(2)


def generalization(
    R: float, rademacher: float, tuples: float, confidence: float = 0.95, constant: float = 1.0
) -> float:
    """Gen_M = constant ( R Rad_S(F)/M + R^2 sqrt( log(1/delta)/M ) ) (Arora et al., Theorem 4.1), delta 1 - confidence.

    The paper gives only the order. `constant` is the factor in its O, and `rademacher` is Rad_S(F), which has no
    formula for networks. Choose both. M is the number of training tuples.
    """
    return constant * (R * rademacher / tuples + R * R * math.sqrt(-math.log1p(-confidence) / tuples))


def _no_collision(prior: Tensor, k: int) -> float:
    """1 - tau_k, which the bounds are divided by. Raises OptionError if it is rounded to 0."""
    chance = 1 - latent.some_collision(prior, k)
    if chance <= 0:
        raise OptionError(f"one of {k} negatives collides almost surely: the bounds are 0/0. Choose a smaller k.", "k")
    return chance


def lemma_4_3(loss: str, k: int, unsupervised: float, prior: Tensor, gen: float = 0.0) -> float:
    """( L_un - tau_k E[ l_t(0) ] + Gen_M )/(1 - tau_k), at least L_sup^mu; t > 0 negatives are of the positive's class.

    For k = 1, as l_1(0) = 1, it is ( L_un - tau + Gen_M )/(1 - tau): Lemma 4.3, Theorem 4.1 with Gen_M, and Proposition
    6.2 with L_un^block (Arora et al.). For larger k it is a step of the proof of Theorem B.1. `prior` (C,) is rho.
    """
    collided = 0.0
    for rho in prior.tolist():
        for t in range(1, k + 1):
            chance = math.comb(k, t) * rho**t * (1 - rho) ** (k - t)
            collided += rho * chance * (1.0 if loss == "hinge" else math.log2(1 + t))
    return (unsupervised - collided + gen) / _no_collision(prior, k)


def lemma_4_4(loss: str, s: float) -> float:
    """1 + c' s(f), at least L_un^= (Arora et al., Lemma 4.4)."""
    return 1 + collision_constant(loss) * s


def theorem_6_1(loss: str, k: int, different: float, s: float, prior: Tensor, gen: float = 0.0) -> float:
    """(1 - tau')/(1 - tau_k) L_un^!= + c' k tau/(1 - tau_k) s(f) + Gen_M/(1 - tau_k) (Arora et al., Theorem B.1).

    For k = 1 it is Theorem 4.5: L_un^!= + c' tau/(1 - tau) s(f) + Gen_M/(1 - tau). `prior` is rho (C,).
    """
    left = _no_collision(prior, k)
    first = (1 - latent.collision(prior, k)) / left * different
    return first + collision_constant(loss) * k * latent.collision(prior) / left * s + gen / left


def margin(R: float, sigma: float, epsilon: float = 0.1, constant: float | None = None) -> float:
    """gamma = 1 + c' R sigma sqrt( log(R/eps) ) (Arora et al., Lemma 5.1).

    The paper leaves c' open. Without one, gamma = 1 + 2 R sigma sqrt( log( sqrt(pi) R sigma/eps ) ), with which the
    lemma is proved here: -v exceeds its mean by more than gamma - 1 by at most eps in expectation, as
    f(x)^T(f(x+) - f(x-)) has 2 R^2 sigma^2-sub-Gaussian noise given x. A log below 0 counts as 0.
    """
    inner, factor = math.sqrt(math.pi) * R * sigma / epsilon, 2.0
    if constant is not None:
        inner, factor = R / epsilon, constant
    return 1 + factor * R * sigma * math.sqrt(math.log(max(inner, 1.0)))


def lemma_5_1(points: Latent, gamma: float, epsilon: float = 0.1) -> float:
    """gamma L_{gamma,sup}^mu + eps, at least the hinge L_un^!= (Arora et al., Lemma 5.1); hinge max(0, 1 - v/gamma)."""
    return gamma * mean_classifier_loss(points.scaled(gamma**-0.5), "hinge") + epsilon


@diagnostic(
    name="unsupervised_loss",
    formula="L_un = E l( { f(x)^T ( f(x+) - f(x_i^-) ) }_{i=1..k} ), exact over the points at hand",
    source="Arora et al. 2019, Eqs. 4-6",
    cost="n^2 log n (hinge), n^2 times some hundred nodes (logistic)",
)
def unsupervised(features: Array, labels: Array, loss: Loss = "hinge", k: Negatives = 1) -> float:
    """The loss of a positive and k negatives drawn by class, with collisions, exactly.

    Args:
        features: (n, d), not normalised.
        labels: (n,) classes. A negative number is no label.
        loss: "hinge" or "logistic" (base 2).
        k: negatives, >= 1.

    Raises:
        DataError: nothing is labelled, or a number is not finite or too large.
        OptionError: an option is out of its range.
    """
    return unsupervised_loss(Latent.of(features, labels), loss, k).whole


@diagnostic(
    name="mean_classifier_loss",
    formula="L_sup^mu = E l( { f(x)^T ( mu_c - mu_c_i ) }_{i=1..k} ), exact over tasks",
    source="Arora et al. 2019, Def. 2.1, 2.2",
    cost="n C",
)
def mean_classifier(features: Array, labels: Array, loss: Loss = "hinge", k: Negatives = 1) -> float:
    """The loss of the classifier of class means on tasks of k + 1 classes, at most what the unsupervised loss allows.

    Args:
        features: (n, d), not normalised.
        labels: (n,) classes, two at least. A negative number is no label.
        loss: "hinge" or "logistic" (base 2).
        k: as in `unsupervised`.

    Raises:
        DataError: as `unsupervised`.
        OptionError: an option is out of its range, or there is one class alone.
    """
    return mean_classifier_loss(Latent.of(features, labels), loss, k)


@diagnostic(
    formula="s(f) = E_{c ~ nu} [ sqrt( ||Sigma(f, c)||_2 ) E_{x ~ D_c} ||f(x)|| ]",
    source="Arora et al. 2019, Sec. 4.2",
    cost="one singular value per class",
)
def intraclass_deviation(features: Array, labels: Array) -> float:
    """How far classes are spread (`deviation`): what a negative of the positive's own class costs.

    Args:
        features: (n, d), not normalised.
        labels: (n,) classes. A negative number is no label.

    Raises:
        DataError: as `unsupervised`.
    """
    return deviation(Latent.of(features, labels))


@diagnostic(
    formula="tau_k = 1 - sum_c rho(c) (1 - rho(c))^k; tau = sum_c rho(c)^2 for k = 1",
    source="Arora et al. 2019, Sec. 4.1, 6.1",
    cost="none",
)
def class_collision(labels: Array, k: Negatives = 1) -> float:
    """Probability that one of k negatives is of the positive's class, or nan without labels.

    Args:
        labels: (n,) classes. A negative number is no label.
        k: negatives, >= 1.

    Raises:
        PairsError: labels are no integers.
        OptionError: `k` is out of its range.
    """
    found = as_classes("labels", labels, None)
    counts = found[found >= 0].unique(return_counts=True)[1].double()
    if not len(counts):
        return math.nan
    return latent.some_collision(counts / counts.sum(), k)
