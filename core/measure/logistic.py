"""Regularised logistic regression to convergence: one solver for a single fit and for many training subsets at once."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dipole.core.ground.errors import OptionError

REFRESH = 20  # iterations after which the preconditioner is made anew: separable points flatten the curvature
SHARED_ABOVE = 16  # columns of logits above which one factor serves all: 100 of their own cost more than they save


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
    targets = torch.nn.functional.one_hot(y, classes).to(x.device, torch.float64)
    subsets = torch.ones(n, 1, dtype=torch.float64, device=x.device)
    solver = _Solver(x.detach().double(), targets, subsets, tolerance=1e-5, history=20, steps=steps)
    converged = solver.solve(1 / (l2 * n))
    weight, bias = solver.coefficients()
    return weight[0], bias[0], converged


def predictions(
    features: np.ndarray, labels: np.ndarray, subsets: np.ndarray, grid: Sequence[float], tolerance: float = 1e-3
) -> np.ndarray:
    """Return what every model predicts for every row, for each value of the inverse regularisation strength.

    Problem p minimises `C sum_n subsets[n, p] l(y_n, w^T x_n + b) + |w|^2 / 2`, the objective of
    `sklearn.linear_model.LogisticRegression(C)` (intercept free, softmax above two classes).

    Args:
        features: (N, d) real and finite.
        labels: (N,) integers 0..K-1.
        subsets: (N, P) bool, the training rows of each problem.
        grid: values of C > 0; they are solved in ascending order, each started from the one before.
        tolerance: stop when the estimated root mean square error of the decision values is below it; > 0.

    Returns:
        (len(grid), N, P) predicted labels, uint16.
    """
    y = torch.as_tensor(np.asarray(labels, dtype=np.int64))
    classes = max(2, int(y.max()) + 1)
    targets = y.float()[:, None] if classes == 2 else torch.nn.functional.one_hot(y, classes).float()
    masks = torch.as_tensor(np.asarray(subsets, dtype=np.float32))
    solver = _Solver(torch.as_tensor(np.asarray(features, dtype=np.float64)), targets, masks, tolerance)
    out = np.empty((len(grid), *subsets.shape), dtype=np.uint16)
    for index in sorted(range(len(grid)), key=lambda i: grid[i]):
        solver.solve(float(grid[index]))
        out[index] = solver.predicted().numpy()
    return out


class _Solver:
    """Current weights of all problems, kept from one C to the next.

    All problems share the feature matrix, so one iteration is two matrix products for all of them; one Cholesky factor
    of the mean Hessian preconditions them all, since leaving a fold out barely bends the curvature, and L-BFGS corrects
    the rest.

    Args:
        x: (N, d) float64. targets: (N, K) one-hot for a softmax, or (N, 1) of 0 and 1 for a single logit; their dtype
            is computed in.
        subsets: (N, P) 0 or 1, the training rows of each problem.
        tolerance: root mean square error of the decision values. history: pairs that L-BFGS remembers.
    """

    def __init__(
        self, x: Tensor, targets: Tensor, subsets: Tensor, tolerance: float, history: int = 5, steps: int = 200
    ) -> None:
        # The intercept is free, so centring changes no prediction; it removes the largest eigenvalue of the Gram
        # matrix.
        self.mean = x.mean(0)
        x = x - self.mean
        self.basis: Tensor | None = None
        if x.shape[1] > len(x):  # the span of the points holds every optimum
            self.basis, triangle = torch.linalg.qr(x.T)  # x = triangle.T basis.T
            x = triangle.T
        self.x = torch.cat([x.to(targets), targets.new_ones(len(x), 1)], 1)  # (N, D)
        self.transposed = self.x.T.contiguous()
        self.gram = self.transposed @ self.x
        self.targets, self.subsets = targets, subsets
        self.sizes = subsets.sum(0)
        self.tolerance, self.history, self.steps = tolerance, history, steps
        (rows, problems), self.columns = subsets.shape, targets.shape[1]
        self.weights = targets.new_zeros(self.x.shape[1], problems, self.columns)
        self.decision = targets.new_zeros(rows, problems, self.columns)
        self.ridge = targets.new_ones(self.x.shape[1], 1, 1)
        self.ridge[-1] = 0.0

    @torch.no_grad()
    def solve(self, c: float) -> bool:
        """Minimise for this C from where the weights stand; whether every problem met the tolerance."""
        gradient, factors = self._gradient(c), self._factors(c)
        history: list[tuple[Tensor, Tensor, Tensor]] = []  # steps s, changes of the gradient y, 1 / <s, y>
        scale = c * self.sizes * (self.tolerance**2)
        direction, decrement = self._direction(gradient, history, factors)
        for number in range(self.steps):
            if bool((decrement <= scale).all()):
                break
            if number % REFRESH == REFRESH - 1:
                factors = self._factors(c, by_row=number >= 4 * REFRESH)
                direction, decrement = self._direction(gradient, history, factors)
            length = torch.ones_like(decrement)
            start_weights, start_decision, start_gradient = self.weights, self.decision, gradient
            change = torch.mm(self.x, direction.flatten(1)).view_as(start_decision)
            for _ in range(30):
                self.weights = start_weights + length[:, None] * direction
                self.decision = start_decision + length[:, None] * change
                gradient = self._gradient(c)
                # Along the direction the slope rises from -decrement: far above 0 the minimum lies behind, where the
                # secant says.
                slope = _inner(gradient, direction)
                beyond = (slope > decrement / 2) & (decrement > scale)
                if not bool(beyond.any()):
                    break
                length = torch.where(beyond, length * (decrement / (slope + decrement)).clamp_min(0.1), length)
            step, bend = self.weights - start_weights, gradient - start_gradient
            curvature = _inner(step, bend)
            history.append((step, bend, torch.where(curvature > 0, 1 / curvature.clamp_min(1e-30), 0.0)))
            del history[: -self.history]
            direction, decrement = self._direction(gradient, history, factors)
        # Rounding of the increments is removed before the next value of C starts from here.
        self.decision = torch.mm(self.x, self.weights.flatten(1)).view_as(self.decision)
        return bool((decrement <= scale).all())

    def predicted(self) -> Tensor:
        """Labels (N, P) of every row by every problem."""
        return (self.decision[..., 0] > 0).long() if self.columns == 1 else self.decision.argmax(-1)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Weight (P, K, d) and bias (P, K) for features as they were given."""
        weight = self.weights[:-1].permute(1, 2, 0)
        if self.basis is not None:
            weight = weight @ self.basis.T.to(weight)
        return weight, self.weights[-1] - weight @ self.mean.to(weight)

    def _probabilities(self) -> Tensor:
        return torch.sigmoid(self.decision) if self.columns == 1 else torch.softmax(self.decision, -1)

    def _gradient(self, c: float) -> Tensor:
        """Gradient of all problems (D, P, K); sum over rows of mask * (p - target) * x, and the ridge."""
        residual = self._probabilities().sub_(self.targets[:, None]).mul_(self.subsets[..., None])
        return (
            torch.mm(self.transposed, residual.flatten(1)).view_as(self.weights).mul_(c).add_(self.ridge * self.weights)
        )

    def _factors(self, c: float, by_row: bool = False) -> list[Tensor]:
        """Cholesky factors of the mean Hessian of all problems, one per column of logits, or one for many columns.

        The curvature p(1-p) of the rows is taken as their mean, which saves a product of the features with themselves,
        or `by_row` as it is: points that are told apart have none left, and the few at the border have it all.
        """
        p = self._probabilities()
        bends = (p * (1 - p) * self.subsets[..., None]).mean(1)  # (N, K)
        if self.columns > SHARED_ABOVE:
            bends = bends.mean(1, keepdim=True)
        factors = []
        for curvature in bends.unbind(1):
            if by_row:
                hessian = (self.transposed * curvature) @ self.x * c
            else:
                hessian = self.gram * (c * max(float(curvature.mean()), 1e-6))
            hessian.diagonal().add_(self.ridge[:, 0, 0] + 1e-6)
            factor, failed = torch.linalg.cholesky_ex(hessian)
            if int(failed):
                jitter = 1e-6 * hessian.diagonal().max().double()
                factor = torch.linalg.cholesky(hessian.double() + jitter * torch.eye(len(hessian)).to(jitter))
            factors.append(factor.to(hessian))
        return factors

    def _precondition(self, vectors: Tensor, factors: list[Tensor]) -> Tensor:
        if len(factors) == 1:
            return torch.cholesky_solve(vectors.flatten(1), factors[0]).view_as(vectors)
        solved = [torch.cholesky_solve(vectors[..., k], factor) for k, factor in enumerate(factors)]
        return torch.stack(solved, -1)

    def _direction(
        self, gradient: Tensor, history: list[tuple[Tensor, Tensor, Tensor]], factors: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """L-BFGS direction of every problem (D, P, K) and its decrement g^T H g (P,)."""
        vector, coefficients = gradient, []
        for step, bend, inverse in reversed(history):
            a = inverse * _inner(step, vector)
            vector = vector - a[:, None] * bend
            coefficients.append(a)
        vector = self._precondition(vector, factors)
        if history:  # the preconditioner at the scale of the last step: fewer steps turn out too long
            _, bend, inverse = history[-1]
            expected = inverse * _inner(bend, self._precondition(bend, factors))
            vector = torch.where(expected > 0, 1 / expected.clamp_min(1e-30), 1.0)[:, None] * vector
        for (step, bend, inverse), a in zip(history, reversed(coefficients), strict=True):
            vector = vector + (a - inverse * _inner(bend, vector))[:, None] * step
        decrement = _inner(gradient, vector)
        if math.isnan(float(decrement.sum())):
            raise FloatingPointError("the logistic regression diverged: the features hold values float32 cannot carry")
        return -vector, decrement


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products per problem (P,) of (D, P, K) tensors."""
    return (left * right).sum((0, 2))
