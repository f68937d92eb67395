"""Regularised logistic regression for many training subsets of one feature matrix, solved together to convergence."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HISTORY = 5
MAX_ITERATIONS = 200


def predictions(
    features: np.ndarray, labels: np.ndarray, subsets: np.ndarray, grid: Sequence[float], tolerance: float = 1e-3
) -> np.ndarray:
    """Return what every model predicts for every row, for each value of the inverse regularisation strength.

    Problem p minimises `C sum_n subsets[n, p] l(y_n, w^T x_n + b) + |w|^2 / 2`, the objective of
    `sklearn.linear_model.LogisticRegression(C)` (intercept free, softmax above two classes). All problems share the
    feature matrix, so one iteration is two matrix products for all of them; one Cholesky factor of the mean Hessian
    preconditions them all, since leaving a fold out barely bends the curvature, and L-BFGS corrects the rest.

    Args:
        features: (N, d) real and finite.
        labels: (N,) integers 0..K-1.
        subsets: (N, P) bool, the training rows of each problem.
        grid: values of C > 0; they are solved in ascending order, each started from the one before.
        tolerance: stop when the estimated root mean square error of the decision values is below it; > 0.

    Returns:
        (len(grid), N, P) predicted labels, uint16.
    """
    solver = _Solver(features, labels, subsets, tolerance)
    out = np.empty((len(grid), *subsets.shape), dtype=np.uint16)
    for index in sorted(range(len(grid)), key=lambda i: grid[i]):
        out[index] = solver.solve(float(grid[index]))
    return out


class _Solver:
    """Current weights of all problems, kept from one C to the next."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, subsets: np.ndarray, tolerance: float) -> None:
        x = torch.as_tensor(np.asarray(features, dtype=np.float64))
        # The intercept is free, so centring changes no prediction; it removes the largest eigenvalue of the Gram
        # matrix.
        x = (x - x.mean(0)).float()
        self.x = torch.cat([x, torch.ones(len(x), 1)], 1)  # (N, D)
        self.transposed = self.x.T.contiguous()
        self.gram = self.transposed @ self.x
        self.subsets = torch.as_tensor(np.asarray(subsets, dtype=np.float32))  # (N, P)
        self.sizes = self.subsets.sum(0)
        self.tolerance = tolerance
        self.classes = max(2, int(labels.max()) + 1)
        self.columns = 1 if self.classes == 2 else self.classes
        y = torch.as_tensor(np.asarray(labels, dtype=np.int64))
        self.targets = (y[:, None] == torch.arange(self.classes)).float() if self.columns > 1 else y.float()[:, None]
        rows, problems = self.subsets.shape
        self.weights = torch.zeros(self.x.shape[1], problems, self.columns)
        self.decision = torch.zeros(rows, problems, self.columns)
        self.ridge = torch.ones(self.x.shape[1], 1, 1)
        self.ridge[-1] = 0.0

    def solve(self, c: float) -> np.ndarray:
        gradient, factors = self._gradient(c), self._factors(c)
        history: list[tuple[Tensor, Tensor, Tensor]] = []  # steps s, changes of the gradient y, 1 / <s, y>
        scale = c * self.sizes * (self.tolerance**2)
        direction, decrement = self._direction(gradient, history, factors)
        for _ in range(MAX_ITERATIONS):
            if bool((decrement <= scale).all()):
                break
            length = torch.ones_like(decrement)
            start_weights, start_decision, start_gradient = self.weights, self.decision, gradient
            change = torch.mm(self.x, direction.flatten(1)).view_as(start_decision)
            for _ in range(30):
                self.weights = start_weights + length[:, None] * direction
                self.decision = start_decision + length[:, None] * change
                gradient = self._gradient(c)
                after = _inner(gradient, self._precondition(gradient, factors))
                worse = (after > 4 * decrement) & (after > scale)
                if not bool(worse.any()):
                    break
                length = torch.where(worse, length / 2, length)
            step, bend = self.weights - start_weights, gradient - start_gradient
            curvature = _inner(step, bend)
            history.append((step, bend, torch.where(curvature > 0, 1 / curvature.clamp_min(1e-30), 0.0)))
            del history[:-HISTORY]
            direction, decrement = self._direction(gradient, history, factors)
        # Rounding of the increments is removed before the next value of C starts from here.
        self.decision = torch.mm(self.x, self.weights.flatten(1)).view_as(self.decision)
        if self.columns == 1:
            return (self.decision[..., 0] > 0).numpy()
        return self.decision.argmax(-1).numpy()

    def _probabilities(self) -> Tensor:
        return torch.sigmoid(self.decision) if self.columns == 1 else torch.softmax(self.decision, -1)

    def _gradient(self, c: float) -> Tensor:
        """Gradient of all problems (D, P, K); sum over rows of mask * (p - target) * x, and the ridge."""
        residual = self._probabilities().sub_(self.targets[:, None]).mul_(self.subsets[..., None])
        return (
            torch.mm(self.transposed, residual.flatten(1)).view_as(self.weights).mul_(c).add_(self.ridge * self.weights)
        )

    def _factors(self, c: float) -> list[Tensor]:
        """Cholesky factors of the Hessian with the mean curvature p(1-p) of all problems, one per column of logits."""
        p = self._probabilities()
        share = self.subsets / self.subsets.sum()
        factors = []
        for column in range(self.columns):
            q = p[..., column]
            curvature = float((q * (1 - q) * share).sum())
            hessian = self.gram * (c * float(self.sizes.mean()) / len(self.x) * max(curvature, 1e-6))
            hessian.diagonal().add_(self.ridge[:, 0, 0] + 1e-6)
            factor, failed = torch.linalg.cholesky_ex(hessian)
            if int(failed):
                factor = torch.linalg.cholesky(
                    hessian.double() + 1e-6 * hessian.diagonal().max() * torch.eye(len(hessian))
                )
            factors.append(factor.float())
        return factors

    def _precondition(self, vectors: Tensor, factors: list[Tensor]) -> Tensor:
        solved = [torch.cholesky_solve(vectors[..., k], factor) for k, factor in enumerate(factors)]
        return solved[0][..., None] if len(solved) == 1 else torch.stack(solved, -1)

    def _direction(self, gradient: Tensor, history: list, factors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """L-BFGS direction of every problem (D, P, K) and its decrement g^T H g (P,)."""
        vector, coefficients = gradient, []
        for step, bend, inverse in reversed(history):
            a = inverse * _inner(step, vector)
            vector = vector - a[:, None] * bend
            coefficients.append(a)
        vector = self._precondition(vector, factors)
        for (step, bend, inverse), a in zip(history, reversed(coefficients), strict=True):
            vector = vector + (a - inverse * _inner(bend, vector))[:, None] * step
        decrement = _inner(gradient, vector)
        if math.isnan(float(decrement.sum())):
            raise FloatingPointError("the logistic regression diverged: the features hold values float32 cannot carry")
        return -vector, decrement


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products per problem (P,) of (D, P, K) tensors."""
    return (left * right).sum((0, 2))
