"""Linear classifiers: logistic regression to convergence, for one fit or many training subsets, and SGD or Adam.

All problems of the convex solver share the features, so an iteration costs two matrix products for all of them. The
features are rotated once into the eigenvectors of X^T X. There the Hessian is nearly diagonal, and L-BFGS with the
Hessian's diagonal as its starting matrix needs few iterations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from dipole.core.utils.errors import DataError, OptionError

STEPS = 400  # iterations for one value of C in float32, and again in float64
REFRESH = (0, 4, 10)  # iterations at which the Hessian's diagonal is computed, and every tenth one after them
STALLED = 60  # iterations without progress after which float32 gives up
ROTATED_BELOW = 3000  # features above which eigenvectors cost more than the iterations that they save
IN_CACHE, ON_DEVICE = 2**20, 2**25  # features and logits that a processor and a device work on at a time
LEAD_FROM = 4  # problems from which on the problem of their mean subset is solved first, as a start for the others
LARGEST = 1e9  # larger features leave no digits in float32 products
SMALLEST_SPREAD = 0.1  # smallest root mean square of the decision values that a relative tolerance refers to

Pair = tuple[Tensor, Tensor, Tensor]  # step s (K, P, D), change y of the gradient (K, P, D) and 1 / <s, y> (P,)


class NotConverged(UserWarning):
    """Some logistic regressions did not reach the tolerance."""

    def __init__(self, count: int, of: int) -> None:
        super().__init__(
            f"{count} of {of} logistic regressions did not converge in {STEPS} iterations of float32 and {STEPS} of "
            "float64. Standardise the features."
        )
        self.count = count


def fit_softmax(
    x: Tensor, y: Tensor, classes: int, l2: float | None = None, steps: int = 500
) -> tuple[Tensor, Tensor, bool]:
    """Fit a multinomial logistic regression of y (n,) on x (n, d) in double precision.

    Minimises mean cross-entropy + l2/2 ||W||^2 (the bias is free) until the root mean square error of the logits is
    about 1e-5. l2 > 0, or None for 1/n, which is scikit-learn's C = 1. Returns weight (C, d), bias (C,), and whether
    the fit converged.
    """
    n = len(x)
    l2 = 1 / n if l2 is None else l2
    if l2 <= 0:
        raise OptionError(
            f"l2 of the convex probe must be above 0 (separable points have no optimum without), got {l2}"
        )
    solver = _Solver(x.detach().double(), y, classes, tolerance=1e-5, relative=False, learned=n, history=20)
    subset = torch.ones(1, n, dtype=torch.float64, device=x.device)
    with torch.no_grad():
        weights, converged = solver.minimise(subset, 1 / (l2 * n), solver.zeros(1), steps)
        weight, bias = solver.coefficients(weights)
    return weight[:, 0], bias[:, 0], bool(converged.all())


def largest_value(features: np.ndarray) -> float:
    """Return the largest absolute value, or NaN if there is one, without copying the features."""
    if not features.size:
        return 0.0
    return max(float(features.max()), -float(features.min()))


@torch.no_grad()
def solve_subsets(
    features: np.ndarray,
    labels: np.ndarray,
    subsets: np.ndarray,
    grid: Sequence[float],
    tolerance: float = 1e-3,
    device: torch.device | str = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Solve the logistic regressions of many training subsets and many values of C.

    Problem p minimises `C sum_n subsets[n, p] l(y_n, w^T x_n + b) + |w|^2 / 2`, the objective of
    `sklearn.linear_model.LogisticRegression(C)` (intercept free, softmax above two classes). Values of C are solved in
    ascending order, each from the solution before, and equal subsets once. `features` (N, d) are at most 1e9 in size,
    `labels` (N,) 0..K-1, `subsets` (N, P) bool. `tolerance` is the largest root mean square error of the decision
    values, as a share of their own (>= 0.1). The device must support float64. Returns the labels (V, N, P) by every
    model for each of V values of C, and whether each model converged (V, P).
    """
    if not (largest := largest_value(features)) <= LARGEST:
        raise DataError(
            f"features reach {largest:.3g} in size; the classifier takes finite ones up to {LARGEST:.0e}. Scale them."
        )
    subsets = np.asarray(subsets, dtype=bool)
    _, first, same = np.unique(np.packbits(subsets, 0), axis=1, return_index=True, return_inverse=True)
    masks = torch.as_tensor(np.ascontiguousarray(subsets.T[first]), dtype=torch.float32).to(device)
    x = torch.as_tensor(np.ascontiguousarray(features))
    if x.dtype not in (torch.float32, torch.float64):
        x = x.double()
    y = torch.as_tensor(np.asarray(labels, dtype=np.int64)).to(device)
    learned = int(masks.any(0).nonzero().max()) + 1
    masks = masks[:, :learned]
    solver = _Solver(x.to(device), y, max(2, int(y.max()) + 1), tolerance, True, learned, dtype=torch.float32)
    out = np.empty((len(grid), *subsets.shape), dtype=np.uint16)
    converged = np.empty((len(grid), subsets.shape[1]), dtype=bool)
    solved: list[tuple[float, Tensor]] = []  # log C and weights of the last two values
    for index in sorted(range(len(grid)), key=lambda i: grid[i]):
        c = float(grid[index])
        weights, met = solver.solve(masks, c, _start(solver, masks, c, solved))
        solved = [*solved[-1:], (math.log(c), weights)]
        out[index] = solver.predicted(weights).T.cpu().numpy()[:, same]
        converged[index] = met.numpy()[same]
    return out, converged


def _start(solver: _Solver, masks: Tensor, c: float, solved: list[tuple[float, Tensor]]) -> Tensor:
    """Return the weights to start from: extrapolated along log C, or the solution for the mean of the subsets."""
    if not solved:
        zeros = solver.zeros(len(masks))
        if len(masks) < LEAD_FROM:
            return zeros
        return solver.minimise(masks.mean(0, keepdim=True), c, zeros[:, :1], STEPS)[0].repeat(1, len(masks), 1)
    (first, before), (second, now) = solved[0], solved[-1]
    if first == second:
        return now
    along = min(1.0, (math.log(c) - second) / (second - first))
    return now + along * (now - before)


class _Solver:
    """Minimise P problems over the first N rows of D features (rotated, with a column of ones), with K logits.

    Rows after them are only predicted. Two classes need one column of logits if `relative`, and two otherwise.
    `tolerance` is the root mean square error of the decision values, or its share of their size if `relative`. L-BFGS
    remembers `history` pairs.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        classes: int,
        tolerance: float,
        relative: bool,
        learned: int,
        history: int = 10,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        # The intercept is free, so centring changes no prediction. It removes the largest eigenvalue of X^T X.
        self.mean = x.mean(0).double()
        mean = self.mean.to(x.dtype)

        def centred(count: int) -> Iterator[tuple[slice, Tensor]]:
            for rows in row_pieces(count, x.shape[1], x.device):
                yield rows, (x[rows] - mean).to(dtype)

        self.basis = _eigenvectors(learned, x.shape[1], centred(learned))  # (d, D - 1)
        width = x.shape[1] if self.basis is None else self.basis.shape[1]
        self.x = x.new_ones(len(x), width + 1, dtype=dtype)
        for rows, piece in centred(len(x)):
            if self.basis is not None:
                piece = piece @ self.basis
            self.x[rows, :-1] = piece
        self.y = y.to(x.device)
        self.ridge = self.x.new_ones(self.x.shape[1])
        self.ridge[-1] = 0
        self.learned, self.tolerance, self.relative, self.history = learned, tolerance, relative, history
        self.columns = 1 if classes == 2 and relative else classes

    def zeros(self, problems: int) -> Tensor:
        """Return weights (K, P, D) of 0."""
        return self.x.new_zeros(self.columns, problems, self.x.shape[1])

    def solve(self, masks: Tensor, c: float, start: Tensor) -> tuple[Tensor, Tensor]:
        """Minimise in single precision, and finish in double precision what single precision cannot."""
        weights, met = self.minimise(masks, c, start, STEPS)
        left = (~met).nonzero().squeeze(1)
        if len(left):
            exact = copy.copy(self)
            exact.x, exact.ridge = self.x.double(), self.ridge.double()
            there = left.to(weights.device)
            better, met[left] = exact.minimise(masks[there].double(), c, weights[:, there].double(), STEPS)
            weights[:, there] = better.to(weights)
        return weights, met

    def minimise(self, masks: Tensor, c: float, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return weights (K, P, D), and whether each problem converged within the steps (P,), on the processor.

        `masks` (P, N) are the weights of the rows in each problem. c is the inverse strength of the regularisation.
        """
        out, met = start.clone(), torch.zeros(len(masks), dtype=torch.bool)
        active = torch.arange(len(masks), device=masks.device)
        weights, pairs = start, list[Pair]()
        gradient, spread = self._gradient(weights, masks, c)
        least, since = math.inf, 0
        for number in range(steps + 1):
            if number in REFRESH or number % REFRESH[-1] == 0:
                scale = self._inverse_diagonal(weights, masks, c)
            direction, decrement = _direction(gradient, pairs, scale)
            bound = c * masks.sum(1) * self.tolerance**2
            if self.relative:
                bound = bound * spread.clamp_min(SMALLEST_SPREAD**2)
            unfinished = decrement > bound
            out[:, active] = weights
            met[active.cpu()] = ~unfinished.cpu()
            worst = float((decrement / bound).max())
            since = 0 if worst < 0.7 * least else since + 1
            least = min(least, worst)
            if worst <= 1 or number == steps or (since >= STALLED and self.x.dtype == torch.float32):
                break
            if int(unfinished.sum()) <= 0.8 * len(unfinished):
                active, masks, weights = active[unfinished], masks[unfinished], weights[:, unfinished]
                gradient, direction = gradient[:, unfinished], direction[:, unfinished]
                decrement, bound = decrement[unfinished], bound[unfinished]
                pairs = [(s[:, unfinished], y[:, unfinished], inverse[unfinished]) for s, y, inverse in pairs]
            moved, new_gradient, spread = self._line_search(weights, direction, decrement, bound, masks, c)
            step, change = moved - weights, new_gradient - gradient
            inner = _inner(step, change)
            pairs = [*pairs, (step, change, torch.where(inner > 0, 1 / inner.clamp_min(1e-30), 0.0))][-self.history :]
            weights, gradient = moved, new_gradient
        return out, met

    def _line_search(
        self, weights: Tensor, direction: Tensor, decrement: Tensor, bound: Tensor, masks: Tensor, c: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Step along the direction, and return the weights, and gradient and mean z^2 there.

        The slope rises from -decrement. If it is far above 0 the step was too long, and the secant says by how much.
        """
        length = torch.ones_like(decrement)
        for _ in range(30):
            moved = weights + length[:, None] * direction
            gradient, spread = self._gradient(moved, masks, c)
            slope = _inner(gradient, direction)
            beyond = (slope > decrement / 2) & (decrement > bound)
            if not bool(beyond.any()):
                break
            length = torch.where(beyond, length * (decrement / (slope + decrement)).clamp_min(0.1), length)
        return moved, gradient, spread

    def _gradient(self, weights: Tensor, masks: Tensor, c: float) -> tuple[Tensor, Tensor]:
        """Return the gradient (K, P, D) and the mean square of the decision values (P,)."""
        total = torch.zeros_like(weights)
        flat, spread = total.view(-1, total.shape[-1]), total.new_zeros(total.shape[1])
        for rows, decision in self._decisions(weights, self.learned):
            spread += torch.linalg.vecdot(decision, decision).sum(0)
            residual, y = _probabilities(decision), self.y[rows]
            if self.columns == 1:
                residual -= y
            else:
                residual[y, :, torch.arange(len(y), device=y.device)] -= 1
            residual *= masks[:, rows]
            flat.addmm_(residual.view(len(flat), -1), self.x[rows])
        total.mul_(c).add_(self.ridge * weights)
        return total, spread / (self.learned * self.columns)

    def _inverse_diagonal(self, weights: Tensor, masks: Tensor, c: float) -> Tensor:
        """Return 1 / diagonal of the Hessian (K, 1, D) at the mean weights. It differs little between problems."""
        diagonal = self.x.new_zeros(self.columns, self.x.shape[1])
        for rows, decision in self._decisions(weights.mean(1, keepdim=True), self.learned):
            p = _probabilities(decision)[:, 0]
            diagonal += (p * (1 - p)) @ self.x[rows].square()
        # The softmax Hessian of equal probabilities has 1 / K on all directions but (1, ..., 1), and p (1 - p) on its
        # diagonal.
        if self.columns > 1:
            diagonal *= self.columns / (self.columns - 1)
        return (1 / (c * float(masks.mean()) * diagonal + self.ridge + 1e-6))[:, None]

    def _decisions(self, weights: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield decision values (K, P, n) of pieces of the first rows."""
        classes, problems, width = weights.shape
        flat = weights.reshape(-1, width)
        for rows in row_pieces(count, len(flat) + width, self.x.device):
            yield rows, (flat @ self.x[rows].T).view(classes, problems, -1)

    def predicted(self, weights: Tensor) -> Tensor:
        """Return the labels (P, N) that every problem predicts."""
        if self.columns == 1:
            return torch.cat([(decision[0] > 0).long() for _, decision in self._decisions(weights, len(self.x))], 1)
        return torch.cat([decision.argmax(0) for _, decision in self._decisions(weights, len(self.x))], 1)

    def coefficients(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight (K, P, d) and bias (K, P) for features as they were given, in float64."""
        weight = weights[..., :-1].double()
        if self.basis is not None:
            weight = weight @ self.basis.T.double()
        return weight, weights[..., -1].double() - weight @ self.mean


def row_pieces(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of the rows whose features and logits are worked on at a time."""
    at_once = IN_CACHE if device.type == "cpu" else ON_DEVICE
    step = max(64, at_once // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _eigenvectors(rows: int, width: int, pieces: Iterator[tuple[slice, Tensor]]) -> Tensor | None:
    """Return the eigenvectors (d, D) of X^T X that span the rows of X (in pieces). None if too many to save time."""
    if min(rows, width) > ROTATED_BELOW:
        return None
    basis: Tensor
    if width <= rows:
        basis = torch.linalg.eigh(sum(piece.T @ piece for _, piece in pieces))[1]
    else:
        x = torch.cat([piece for _, piece in pieces])
        values, vectors = torch.linalg.eigh(x @ x.T)
        kept = values > values[-1] * torch.finfo(x.dtype).eps * rows
        basis = torch.linalg.qr(x.T @ vectors[:, kept])[0]
    return basis


def _probabilities(decision: Tensor) -> Tensor:
    """Turn decision values (K, P, N) into probabilities, in place."""
    if len(decision) == 1:
        return decision.sigmoid_()
    decision -= decision.amax(0)
    decision.exp_()
    decision /= decision.sum(0)
    return decision


def _direction(gradient: Tensor, pairs: list[Pair], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the L-BFGS direction -H g of every problem (K, P, D) and its decrement g^T H g (P,)."""
    vector, coefficients = gradient, []
    for step, change, inverse in reversed(pairs):
        a = inverse * _inner(step, vector)
        vector = vector - a[:, None] * change
        coefficients.append(a)
    vector = vector * scale
    for (step, change, inverse), a in zip(pairs, reversed(coefficients), strict=True):
        vector = vector + (a - inverse * _inner(change, vector))[:, None] * step
    decrement = _inner(gradient, vector)
    if math.isnan(float(decrement.sum())):
        raise DataError("the logistic regression diverged: the features hold values that cannot be multiplied")
    return -vector, decrement


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of every problem (P,) of (K, P, D) tensors."""
    out: Tensor = torch.linalg.vecdot(left, right).sum(0)
    return out


# Training by SGD or Adam, on fixed features or on random views -------------------------------------------------------

ViewFeatures = Callable[[int, Sequence[Tensor]], Iterator[Tensor]]
"""(epoch, batches of row numbers) -> features (b, d) of each batch, in order."""

# solver -> batch size, learning rate, factor at each milestone
CUSTOMARY = {"adam": (128, 1e-3, 0.2), "sgd": (256, 30.0, 0.1)}


@dataclass(frozen=True)
class Descent:
    """Training of a linear classifier. None takes the papers' value for the solver.

    solver: "adam", betas (0.5, 0.999), batch 128, rate 1e-3, times 0.2 at milestones (CACR App. C.1); "sgd", momentum
        0.9, batch 256, rate 30, times 0.1 at milestones (CACR App. C.2, after He et al. 2020).
    schedule: "step", at `milestones` in epochs, 60 % and 80 % of them by default; "cosine", to 0 from epoch to epoch.
    """

    solver: str
    epochs: int = 100
    batch_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float = 0.0
    schedule: str = "step"
    milestones: tuple[int, ...] | None = None
    decay: float | None = None


def descend(rows: ViewFeatures, labels: Tensor, classes: int, width: int, how: Descent, seed: int) -> nn.Linear:
    """Train a linear layer (classes, width) by mean cross-entropy on features of batches of rows with labels (n,).

    Order and initial weights are drawn from the seed on the CPU. The layer is on the labels' device.
    """
    batch_size, rate, decay = CUSTOMARY[how.solver]
    layer = nn.Linear(width, classes, device=labels.device)
    nn.init.zeros_(layer.bias)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 0.01)
    settings: dict[str, Any] = {"lr": how.learning_rate or rate, "weight_decay": how.weight_decay}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9, **settings)
    if how.solver == "adam":
        optimizer = torch.optim.Adam(layer.parameters(), betas=(0.5, 0.999), **settings)
    customary = round(0.6 * how.epochs), round(0.8 * how.epochs)
    milestones = customary if how.milestones is None else how.milestones
    schedule: Any = MultiStepLR(optimizer, list(milestones), gamma=how.decay or decay)
    if how.schedule == "cosine":
        schedule = CosineAnnealingLR(optimizer, how.epochs)
    for epoch in range(how.epochs):
        batches = torch.randperm(len(labels), generator=generator).split(how.batch_size or batch_size)
        for index, features in zip(batches, rows(epoch, batches), strict=True):
            optimizer.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(layer(features), labels[index.to(labels.device)]).backward()
            optimizer.step()
        schedule.step()
    return layer
