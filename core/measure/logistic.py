"""Regularised logistic regression to convergence: one solver for a single fit and for many training subsets at once."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dipole.core.ground.errors import DataError, OptionError
from dipole.core.measure.preconditioner import Curvature, Preconditioner, preconditioner

STEPS = 400  # iterations a value of C may take; a problem that needs more is said to
FIRST_REFRESH, REFRESH = 4, 20  # iterations after which the preconditioner is made anew: curvature moves with the fit
FAR = 1e4  # times the bound, where the first fit still is then: the factors are worth making anew
IN_CACHE = 2**18  # logits worked on at a time
TOGETHER = 128  # columns of logits that are solved at once: thin matrix products do not fill a processor
LARGEST = 1e9  # features beyond leave no digits in float32 products
SMALLEST_SPREAD = 0.1  # of the decision values, below which a tolerance that is a share of it is one of this


def fit_softmax(
    x: Tensor, y: Tensor, classes: int, l2: float | None = None, steps: int = 500
) -> tuple[Tensor, Tensor, bool]:
    """Weight (C, d), bias (C,) of the multinomial logistic regression of y (n,) on x (n, d), and whether it converged.

    Minimises mean cross-entropy + l2/2 ||W||^2 (the bias is free) in double precision, until the root mean square error
    of the logits is about 1e-5; l2 None takes 1/n, which is scikit-learn's C = 1.
    """
    n = len(x)
    l2 = 1 / n if l2 is None else l2
    if l2 <= 0:
        raise OptionError(
            f"l2 of the convex probe must be above 0 (separable points have no optimum without), got {l2}"
        )
    subsets = torch.ones(1, n, dtype=torch.float64, device=x.device)
    solver = _Solver(x.detach().double(), y, classes, subsets, tolerance=1e-5, history=20, steps=steps)
    converged = solver.solve([1 / (l2 * n)])
    weight, bias = solver.coefficients()
    return weight[:, 0], bias[:, 0], bool(converged.all())


class NotConverged(UserWarning):
    """So many logistic regressions met no tolerance."""

    def __init__(self, count: int, of: int) -> None:
        super().__init__(
            f"{count} of {of} logistic regressions did not converge in {STEPS} iterations of float32 and {STEPS} of "
            "float64; standardise the features"
        )
        self.count = count


def size_of(features: np.ndarray) -> float:
    """The largest absolute value, NaN if there is one; without a copy of them."""
    return max(float(features.max(initial=0)), -float(features.min(initial=0))) if features.size else 0.0


@dataclass(frozen=True)
class Predicted:
    """Labels (V, N, P) by every model, for each of V values of C, and whether each met the tolerance (V, P)."""

    labels: np.ndarray
    converged: np.ndarray


def predictions(
    features: np.ndarray, labels: np.ndarray, subsets: np.ndarray, grid: Sequence[float], tolerance: float = 1e-3
) -> np.ndarray:
    """Return what every model predicts for every row, for each value of the inverse regularisation strength.

    As `solve_subsets`, whose labels (len(grid), N, P) it gives; a problem that has not converged is warned of.
    """
    found = solve_subsets(features, labels, subsets, grid, tolerance)
    missed = int((~found.converged).sum())
    if missed:
        warnings.warn(NotConverged(missed, found.converged.size), stacklevel=2)
    return found.labels


def solve_subsets(
    features: np.ndarray, labels: np.ndarray, subsets: np.ndarray, grid: Sequence[float], tolerance: float = 1e-3
) -> Predicted:
    """Solve the logistic regressions of many training subsets and many values of C.

    Problem p minimises `C sum_n subsets[n, p] l(y_n, w^T x_n + b) + |w|^2 / 2`, the objective of
    `sklearn.linear_model.LogisticRegression(C)` (intercept free, softmax above two classes).

    Args:
        features: (N, d) real and finite, at most 1e9 in size. A row in no subset is predicted only.
        labels: (N,) integers 0..K-1.
        subsets: (N, P) bool, the training rows of each problem.
        grid: values of C > 0; they are solved in ascending order, each started from the one before.
        tolerance: stop when the estimated root mean square error of the decision values is below so much of their own
            root mean square (of 0.1 where that is smaller); > 0.

    Raises:
        DataError: for features too large to be multiplied.
    """
    largest = size_of(features)
    if not largest <= LARGEST:
        raise DataError(
            f"features reach {largest:.3g} in size; the classifier takes finite ones up to {LARGEST:.0e}. Scale them"
        )
    subsets = np.asarray(subsets, dtype=bool)
    used = subsets.any(1)
    x = torch.as_tensor(np.ascontiguousarray(features))
    x = x if x.dtype in (torch.float32, torch.float64) else x.double()
    y = torch.as_tensor(np.asarray(labels, dtype=np.int64))
    classes = max(2, int(y.max()) + 1)
    rest = x[torch.as_tensor(~used)]
    if rest.numel():
        x, y = x[torch.as_tensor(used)], y[torch.as_tensor(used)]
    masks = torch.as_tensor(np.ascontiguousarray(subsets[used].T), dtype=torch.float32)
    solver = _Solver(x, y, classes, masks, tolerance, steps=STEPS, relative=True)
    order = sorted(range(len(grid)), key=lambda i: grid[i])
    columns = (1 if classes == 2 else classes) * len(masks) * len(grid)
    groups = [order] if columns <= TOGETHER else [[i] for i in order]
    out = np.empty((len(grid), *subsets.shape), dtype=np.uint16)
    converged = np.empty((len(grid), subsets.shape[1]), dtype=bool)
    for group in groups:
        converged[group] = solver.solve([float(grid[i]) for i in group]).numpy()
        for where, rows in ((used, None), (~used, rest)):
            if where.any():
                found = solver.predicted(rows).view(len(group), len(masks), -1).transpose(1, 2)
                for place, index in enumerate(group):
                    out[index][where] = found[place].numpy()
    return Predicted(out, converged)


class _Solver:
    """Current weights of all problems, kept from one value of C to the next.

    All problems share the features, so an iteration is two matrix products for all of them, made in pieces of rows that
    stay in the cache; one preconditioner serves them all, since leaving a fold out barely bends the curvature, and
    L-BFGS corrects the rest. A problem that has converged leaves the iteration. What float32 cannot finish is finished
    in float64.

    Args:
        x: (N, d) float32 or float64.
        y: (N,) long, 0..classes-1.
        subsets: (P, N) 0 or 1, the training rows of each problem; its dtype is computed in.
        tolerance: root mean square error of the decision values, or its share of their size where `relative`.
        history: pairs that L-BFGS remembers.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        classes: int,
        subsets: Tensor,
        tolerance: float,
        history: int = 10,
        steps: int = STEPS,
        relative: bool = False,
    ) -> None:
        # The intercept is free, so centring changes no prediction; it removes the largest eigenvalue of the Gram
        # matrix.
        self.mean = x.mean(0).double()
        self.basis: Tensor | None = None
        if x.shape[1] > 2 * len(x):  # the span of the points holds every optimum
            self.basis, triangle = torch.linalg.qr((x.double() - self.mean).T)  # x = triangle.T basis.T
            inner = triangle.T
        else:
            inner = x - self.mean.to(x)
        self.x = torch.cat([inner.to(subsets), subsets.new_ones(len(x), 1)], 1)  # (N, D)
        self.y, self.subsets = y.to(x.device), subsets
        self.tolerance, self.history, self.steps, self.relative = tolerance, history, steps, relative
        self.columns = 1 if classes == 2 and relative else classes
        self.ridge = subsets.new_ones(self.x.shape[1])
        self.ridge[-1] = 0.0
        self.weights = subsets.new_zeros(self.columns, len(subsets), self.x.shape[1])  # (K, Q, D)
        self.curvature = Curvature(self.x)

    @torch.no_grad()
    def solve(self, values: Sequence[float]) -> Tensor:
        """Minimise for these values of C from where the weights stand; (V, P) whether the tolerance was met."""
        problems = len(self.subsets)
        start = self.weights[:, -problems:].repeat(1, len(values), 1)
        c = torch.tensor(values).repeat_interleave(problems).to(start)
        which = torch.arange(problems, device=start.device).repeat(len(values))
        state = _State(start, c, which)
        left = self._descend(state, self.steps)
        if left.numel() and self.x.dtype == torch.float32:
            left = left[self._in_double(state, left)]
        self.weights = state.weights
        met = torch.ones(len(which), dtype=torch.bool)
        met[left.cpu()] = False
        return met.view(len(values), problems)

    def _in_double(self, state: "_State", left: Tensor) -> Tensor:
        """Go on in float64 with the columns that are left; places among them of those that stay unfinished."""
        exact = object.__new__(_Solver)
        exact.__dict__.update(self.__dict__)
        exact.x, exact.subsets, exact.ridge = self.x.double(), self.subsets.double(), self.ridge.double()
        exact.curvature = Curvature(exact.x)
        part = _State(state.weights[:, left].double(), state.c[left].double(), state.which[left])
        missed = exact._descend(part, self.steps)
        state.weights[:, left] = part.weights.to(state.weights)
        return missed

    def _descend(self, state: "_State", steps: int) -> Tensor:
        """Iterate until all columns have converged or the steps are used up; the columns that have not (M,)."""
        active = torch.arange(len(state.c), device=state.c.device)
        now = _State(state.weights.clone(), state.c, state.which)
        gradient, spread = self._gradient(now)
        precondition = preconditioner(self.curvature, self._bends(now), now.c, self.ridge)
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # steps s, changes of the gradient y, 1 / <s, y>
        stalled, least = 0, math.inf
        for number in range(1, steps + 1):
            direction, decrement = _direction(gradient, pairs, precondition)
            bound = now.c * self.subsets.sum(1)[now.which] * self.tolerance**2
            if self.relative:
                bound = bound * spread.clamp_min(SMALLEST_SPREAD**2)
            open_ = decrement > bound
            if not bool(open_.any()):
                state.weights[:, active] = now.weights
                return active[:0]
            worst = float((decrement / bound).max())
            stalled = 0 if worst < 0.7 * least else stalled + 1
            least = min(least, worst)
            if stalled >= 3 * REFRESH and self.x.dtype == torch.float32:
                break  # rounding, not curvature, holds it up
            if int(open_.sum()) <= 0.8 * len(open_):
                state.weights[:, active] = now.weights
                active, now = active[open_], now.take(open_)
                gradient, direction = gradient[:, open_], direction[:, open_]
                decrement, bound = decrement[open_], bound[open_]
                pairs = [(step[:, open_], bend[:, open_], inverse[open_]) for step, bend, inverse in pairs]
                precondition = precondition.take(open_)
            before, first = now.weights, gradient
            length = torch.ones_like(decrement)
            for _ in range(30):
                now.weights = before + length[:, None] * direction
                gradient, spread = self._gradient(now)
                # Along the direction the slope rises from -decrement: far above 0 the minimum lies behind, where the
                # secant says.
                slope = _inner(gradient, direction)
                beyond = (slope > decrement / 2) & (decrement > bound)
                if not bool(beyond.any()):
                    break
                length = torch.where(beyond, length * (decrement / (slope + decrement)).clamp_min(0.1), length)
            step, bend = now.weights - before, gradient - first
            inner = _inner(step, bend)
            pairs.append((step, bend, torch.where(inner > 0, 1 / inner.clamp_min(1e-30), 0.0)))
            del pairs[: -self.history]
            far = number == FIRST_REFRESH and worst > FAR
            if far or number % REFRESH == 0:
                precondition = preconditioner(
                    self.curvature, self._bends(now), now.c, self.ridge, slow=number >= REFRESH
                )
        state.weights[:, active] = now.weights
        _, decrement = _direction(gradient, pairs, precondition)
        return active[decrement > bound] if len(decrement) == len(bound) else active

    def predicted(self, features: Tensor | None = None) -> Tensor:
        """Labels (Q, N) of the points fitted, or of other features (N, d), by every column."""
        if features is None:
            return torch.cat([_labels(decision) for _, decision in self._decisions(self.weights)], 1)
        weight, bias = self.coefficients()
        rows = max(1, IN_CACHE // bias.numel())
        found = [_labels(weight @ part.T.to(weight) + bias[..., None]) for part in features.split(rows)]
        return torch.cat(found, 1)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Weight (K, Q, d) and bias (K, Q) for features as they were given, in float64."""
        weight = self.weights[..., :-1].double()
        if self.basis is not None:
            weight = weight @ self.basis.T
        return weight, self.weights[..., -1].double() - weight @ self.mean

    def _decisions(self, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Decision values (K, Q, n) of pieces of the rows."""
        classes, columns, width = weights.shape
        rows = max(64, IN_CACHE // (classes * columns))
        flat = weights.reshape(-1, width)
        for start in range(0, len(self.x), rows):
            piece = slice(start, start + rows)
            yield piece, (flat @ self.x[piece].T).view(classes, columns, -1)

    def _gradient(self, now: "_State") -> tuple[Tensor, Tensor]:
        """Gradient of all columns (K, Q, D), sum over rows of mask * (p - target) * x and the ridge; mean z^2 (Q,)."""
        total = torch.zeros_like(now.weights)
        flat, spread = total.view(-1, total.shape[-1]), total.new_zeros(total.shape[1])
        every = torch.equal(now.which, torch.arange(len(self.subsets), device=now.which.device))
        for piece, decision in self._decisions(now.weights):
            spread += torch.linalg.vecdot(decision, decision).sum(0)
            residual, y = _probabilities(decision), self.y[piece]
            if self.columns == 1:
                residual -= y
            else:
                residual[y, :, torch.arange(len(y), device=y.device)] -= 1
            residual *= self.subsets[:, piece] if every else self.subsets[now.which, piece]
            flat.addmm_(residual.view(len(flat), -1), self.x[piece])
        total.mul_(now.c[:, None]).add_(self.ridge * now.weights)
        return total, spread / (len(self.x) * self.columns)

    def _bends(self, now: "_State") -> Tensor:
        """Mean probabilities of every row over its columns of one C: (V, K, N), V values of C in their order."""
        values, place = now.c.unique_consecutive(return_inverse=True)
        # One problem for each C stands for all of its folds: the one in the middle of their weights.
        middle = now.weights.new_zeros(self.columns, len(values), now.weights.shape[-1])
        middle.index_add_(1, place, now.weights)
        middle /= torch.bincount(place)[:, None]
        parts = [_probabilities(decision) for _, decision in self._decisions(middle)]
        return torch.cat(parts, -1).transpose(0, 1) if len(parts) > 1 else parts[0].transpose(0, 1)


@dataclass
class _State:
    """Weights (K, Q, D) of the columns, their C (Q,) and the problem (Q,) that each is."""

    weights: Tensor
    c: Tensor
    which: Tensor

    def take(self, kept: Tensor) -> "_State":
        return _State(self.weights[:, kept], self.c[kept], self.which[kept])


def _probabilities(decision: Tensor) -> Tensor:
    """In place, from decision values (K, Q, N)."""
    if len(decision) == 1:
        return decision.sigmoid_()
    decision -= decision.amax(0)
    decision.exp_()
    decision /= decision.sum(0)
    return decision


def _labels(decision: Tensor) -> Tensor:
    return (decision[0] > 0).long() if len(decision) == 1 else decision.argmax(0)


def _direction(
    gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], precondition: Preconditioner
) -> tuple[Tensor, Tensor]:
    """L-BFGS direction of every column (K, Q, D) and its decrement g^T H g (Q,)."""
    vector, coefficients = gradient, []
    for step, bend, inverse in reversed(pairs):
        a = inverse * _inner(step, vector)
        vector = vector - a[:, None] * bend
        coefficients.append(a)
    vector = precondition(vector)
    if pairs and not precondition.scaled:  # at the scale of the last step: fewer steps turn out too long
        _, bend, inverse = pairs[-1]
        expected = inverse * _inner(bend, precondition(bend))
        vector = torch.where(expected > 0, 1 / expected.clamp_min(1e-30), 1.0)[:, None] * vector
    for (step, bend, inverse), a in zip(pairs, reversed(coefficients), strict=True):
        vector = vector + (a - inverse * _inner(bend, vector))[:, None] * step
    decrement = _inner(gradient, vector)
    if math.isnan(float(decrement.sum())):
        raise DataError("the logistic regression diverged: the features hold values that cannot be multiplied")
    return -vector, decrement


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products per column (Q,) of (K, Q, D) tensors."""
    out: Tensor = torch.linalg.vecdot(left, right).sum(0)
    return out
