"""L_sup: the best linear classifier of each task, found by minimisation from the mean classifier on."""

import math
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from dipole.core.evaluation.theory.arora import mean_classifier_loss
from dipole.core.evaluation.theory.expectation import margin_loss
from dipole.core.evaluation.theory.latent import Latent

SMOOTHING = (1.0, 0.3, 0.1, 0.03)
"""The hinge is minimised through max(0, u) ~ s log(1 + e^{u/s}) with these s, one after the other."""


@dataclass(frozen=True)
class Supervised:
    """L_sup(f) over tasks of k + 1 classes."""

    loss: float  # the mean over all tasks
    error: float  # standard error from the choice of tasks; 0 where all were fitted
    tasks: int  # number of tasks that were fitted
    of: int  # number of tasks there are


def trained_loss(points: Latent, loss: str = "hinge", k: int = 1, tasks: int = 50, seed: int = 0) -> Supervised:
    """L_sup(f) = E_T inf_W L_sup(T, W f) over tasks of k + 1 distinct classes (Arora et al., Eq. 3, Def. 2.2).

    Use all tasks if there are at most `tasks`, else draw `tasks`. With drawn tasks the mean classifier is the control
    variate if that lowers the error, because its loss over all tasks is known. The search starts at the mean
    classifier. So the result on each task lies between the infimum and the mean classifier's loss.
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
    # The mean classifier's loss over all tasks is known: of its loss less the gain, and the loss itself, the steadier.
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
    spans = [points.spans[c] for c in task]
    x = torch.cat([points.features[span] for span in spans])  # (m, d)
    y = torch.cat([torch.full((span.stop - span.start,), i) for i, span in enumerate(spans)])
    weight = torch.cat([torch.full((s.stop - s.start,), 1 / ((s.stop - s.start) * len(spans))) for s in spans]).double()
    start = points.means[list(task)]
    best = before = float(weight @ margin_loss(loss, _margins(x @ start.T, y)))
    W = start.clone().requires_grad_()
    for smooth in SMOOTHING if loss == "hinge" else SMOOTHING[:1]:
        _minimise(W, x, y, weight, loss, smooth)
        with torch.no_grad():
            now = float(weight @ margin_loss(loss, _margins(x @ W.T, y)))
        best = min(best, now) if math.isfinite(now) else best
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
            each = margin_loss(loss, v)
        value = weight @ each
        value.backward()
        return value

    optimizer.step(closure)
