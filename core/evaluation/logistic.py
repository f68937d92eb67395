"""Regularised logistic regression to convergence: one solver for a single fit and for many training subsets at once."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.preconditioner import PLAIN_ABOVE, Curvature, Preconditioner, preconditioner
from dipole.core.utils.errors import DataError, OptionError

STEPS = 400  # iterations a value of C may take; a problem that needs more is said to
FIRST_REFRESH, REFRESH = 4, 20  # iterations after which the preconditioner is made anew: curvature moves with the fit
SLOW = 20  # iterations after which a dearer one is worth it
FAR = 1e4  # times the bound, where the first fit still is then: the factors are worth making anew
IN_CACHE = 2**18  # logits worked on at a time by a processor; a device has no use for small pieces
KEPT = 2**25  # logits that are kept from one iteration to the next; more are made anew
LED = 4  # problems from which on that of their mean is solved first, for the others to start from
LEADS = 16  # times the tolerance that this is solved to: it is no more than a start
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
    features: np.ndarray,
    labels: np.ndarray,
    subsets: np.ndarray,
    grid: Sequence[float],
    tolerance: float = 1e-3,
    device: torch.device | str = "cpu",
) -> np.ndarray:
    """Return what every model predicts for every row, for each value of the inverse regularisation strength.

    As `solve_subsets`, whose labels (len(grid), N, P) it gives; a problem that has not converged is warned of.
    """
    found = solve_subsets(features, labels, subsets, grid, tolerance, device)
    missed = int((~found.converged).sum())
    if missed:
        warnings.warn(NotConverged(missed, found.converged.size), stacklevel=2)
    return found.labels


def solve_subsets(
    features: np.ndarray,
    labels: np.ndarray,
    subsets: np.ndarray,
    grid: Sequence[float],
    tolerance: float = 1e-3,
    device: torch.device | str = "cpu",
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
        device: where they are solved; it has to know float64.

    Raises:
        DataError: for features too large to be multiplied.
    """
    largest = size_of(features)
    if not largest <= LARGEST:
        raise DataError(
            f"features reach {largest:.3g} in size; the classifier takes finite ones up to {LARGEST:.0e}. Scale them"
        )
    subsets = np.asarray(subsets, dtype=bool)
    used: np.ndarray = np.asarray(subsets.any(1))
    x = torch.as_tensor(np.ascontiguousarray(features))
    x = (x if x.dtype in (torch.float32, torch.float64) else x.double()).to(device)
    y = torch.as_tensor(np.asarray(labels, dtype=np.int64)).to(device)
    classes = max(2, int(y.max()) + 1)
    rest = _rows(x, ~used)
    x, y = _rows(x, used), _rows(y, used)
    distinct, same = _distinct(subsets[used])
    masks = torch.as_tensor(distinct, dtype=torch.float32).to(device)
    solver = _Solver(x, y, classes, masks, tolerance, steps=STEPS, relative=True)
    order = sorted(range(len(grid)), key=lambda i: grid[i])
    columns = (1 if classes == 2 else classes) * len(masks) * len(grid)
    groups = [order] if columns <= TOGETHER else [[i] for i in order]
    out = np.empty((len(grid), *subsets.shape), dtype=np.uint16)
    converged = np.empty((len(grid), subsets.shape[1]), dtype=bool)
    for group in groups:
        if len(group) > 1 and len(masks) >= LED:
            solver.lead([float(grid[i]) for i in group])
        converged[group] = solver.solve([float(grid[i]) for i in group]).numpy()[:, same]
        for where, rows in ((used, None), (~used, rest)):
            if where.any():
                found = solver.predicted(rows).view(len(group), len(masks), -1).transpose(1, 2)
                for place, index in enumerate(group):
                    out[index][where] = found[place].cpu().numpy()[:, same]
    return Predicted(out, converged)


def _distinct(subsets: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Different columns of (N, P) as rows, and which of them each column is."""
    places: dict[bytes, int] = {}
    same = [places.setdefault(column.tobytes(), len(places)) for column in np.packbits(subsets, 0).T]
    return np.ascontiguousarray(subsets.T[[same.index(place) for place in range(len(places))]]), same


def _rows(x: Tensor, which: np.ndarray) -> Tensor:
    """Those rows; a view where they follow each other."""
    places = np.flatnonzero(which)
    if not len(places) or places[-1] - places[0] + 1 == len(places):
        return x[places[0] : places[-1] + 1] if len(places) else x[:0]
    return x[torch.as_tensor(places)]


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
            inner = x
        self.x = subsets.new_ones(len(x), inner.shape[1] + 1)  # (N, D)
        self.x[:, :-1] = inner if self.basis is not None or x.dtype == subsets.dtype else x.double() - self.mean
        if self.basis is None and x.dtype == subsets.dtype:
            self.x[:, :-1] -= self.mean.to(x)
        self.y, self.subsets = y.to(x.device), subsets
        self.tolerance, self.history, self.steps, self.relative = tolerance, history, steps, relative
        self.columns = 1 if classes == 2 and relative else classes
        self.ridge = subsets.new_ones(self.x.shape[1])
        self.ridge[-1] = 0.0
        self.curvature = Curvature(self.x)
        self.state = self._blank([0.0])
        self.solved: list[tuple[float, Tensor]] = []  # log C and weights of the last two values that were solved alone
        self.dear: Preconditioner | None = None  # of one column, made where the iteration was slow
        self.led: _State | None = None  # of the problem of the mean subset, a column for each C

    def _blank(self, values: Sequence[float]) -> "_State":
        """All problems at each value of C, from nothing."""
        problems = len(self.subsets)
        c = torch.tensor(values).repeat_interleave(problems).to(self.x)
        which = torch.arange(problems, device=c.device).repeat(len(values))
        state = _State(self.x.new_zeros(self.columns, len(c), self.x.shape[1]), c, which)
        if self._room(len(c)):
            state.decision = self.x.new_zeros(self.columns, len(c), len(self.x))
        return state

    def _room(self, columns: int) -> bool:
        """Whether the decision values of so many columns are kept; of many classes a step seldom asks twice."""
        return self.columns <= PLAIN_ABOVE and self.columns * columns * len(self.x) <= KEPT

    def _preconditioner(self, now: "_State", slow: bool = False) -> Preconditioner:
        return preconditioner(self.curvature, lambda: self._bends(now), self.columns, now.c, self.ridge, slow)

    def _taken_over(self, now: "_State") -> Preconditioner | None:
        """The dear one of a smaller C, if one was needed: the data bend no less now, so the decrement is no smaller."""
        return None if self.dear is None else self.dear.repeat(len(now.c))

    @torch.no_grad()
    def lead(self, values: Sequence[float]) -> None:
        """Solve the problem of the mean subset at the values of C that are solved next, which start from it.

        Folds differ by a tenth of their rows: one column tells most of what all would find, curvature included.
        """
        leader = copy.copy(self)
        leader.subsets, leader.tolerance = self.subsets.mean(0, keepdim=True), LEADS * self.tolerance
        self.led = leader._blank(values)
        leader._descend(self.led, self.steps, whole=True)

    @torch.no_grad()
    def solve(self, values: Sequence[float]) -> Tensor:
        """Minimise for these values of C from where the last one ended; (V, P) whether the tolerance was met."""
        state = self._start(values)
        left = self._descend(state, self.steps)
        if left.numel() and self.x.dtype == torch.float32:
            left = left[self._in_double(state, left)]
            state.decision = None
        self.state = state
        self.solved = [*self.solved[-1:], (math.log(values[0]), state.weights)] if len(values) == 1 else []
        met = torch.ones(len(state.c), dtype=torch.bool)
        met[left.cpu()] = False
        return met.view(len(values), -1)

    def _start(self, values: Sequence[float]) -> "_State":
        """Where these values of C start: weights bend little along log C, so the two before tell the next."""
        state = self._blank(values)
        if self.led is not None:
            led = self.led.repeat(len(self.subsets))
            state.weights, state.pairs, state.decision = led.weights, led.pairs, led.decision
            state.precondition = led.precondition
        elif self.solved:
            (first, before), (second, now) = self.solved[0], self.solved[-1]
            along = min(1.0, (math.log(values[0]) - second) / (second - first)) if first < second else 0.0
            state.weights, state.decision = now + along * (now - before), None
        elif self.columns > PLAIN_ABOVE:
            # From nothing every class bends as 1 / K, and at the end as its own points do, at about even odds: those
            # that are against all others are reached along the class means, rather than by a search for the scale.
            gradient, _ = self._gradient(state)
            reached = _inner(gradient, gradient) / (state.c * self.subsets.sum(1)[state.which])  # mean margin (Q,)
            length = math.log(self.columns) / reached.clamp_min(1e-30)
            state.weights, state.decision = -length[:, None] * gradient, None
        return state

    def _in_double(self, state: "_State", left: Tensor) -> Tensor:
        """Go on in float64 with the columns that are left; places among them of those that stay unfinished."""
        exact = object.__new__(_Solver)
        exact.__dict__.update(self.__dict__)
        exact.x, exact.subsets, exact.ridge = self.x.double(), self.subsets.double(), self.ridge.double()
        exact.curvature, exact.dear = Curvature(exact.x), None
        part = _State(state.weights[:, left].double(), state.c[left].double(), state.which[left])
        missed = exact._descend(part, self.steps)
        state.weights[:, left] = part.weights.to(state.weights)
        return missed

    def _descend(self, state: "_State", steps: int, whole: bool = False) -> Tensor:
        """Iterate until all columns have converged or the steps are used up; the columns that have not (M,).

        `whole`: what has converged goes on with the rest, and the state keeps what was learnt of the curvature.
        """
        active = torch.arange(len(state.c), device=state.c.device)
        now = copy.copy(state)
        now.weights = state.weights.clone()
        if now.decision is None and self._room(len(now.c)):
            now.decision = state.decision = self._product(now.weights)
        gradient, spread = self._gradient(now)
        precondition = now.precondition or self._taken_over(now) or self._preconditioner(now)
        stalled, least, careful = 0, math.inf, False
        for number in range(1, steps + 1):
            direction, decrement = _direction(gradient, now.pairs, precondition)
            bound = now.c * self.subsets.sum(1)[now.which] * self.tolerance**2
            if self.relative:
                bound = bound * spread.clamp_min(SMALLEST_SPREAD**2)
            open_ = decrement > bound
            if not bool(open_.any()):
                state.keep(active, now, precondition if whole else None)
                return active[:0]
            worst = float((decrement / bound).max())
            stalled = 0 if worst < 0.7 * least else stalled + 1
            least = min(least, worst)
            if stalled >= 3 * REFRESH and self.x.dtype == torch.float32:
                break  # rounding, not curvature, holds it up
            if not whole and int(open_.sum()) <= 0.8 * len(open_):
                state.keep(active, now)
                active, now = active[open_], now.take(open_)
                gradient, direction = gradient[:, open_], direction[:, open_]
                decrement, bound = decrement[open_], bound[open_]
                precondition = precondition.take(open_)
            before, first = now.weights, gradient
            gradient, spread, careful = self._move(now, direction, decrement, bound, careful)
            step, bend = now.weights - before, gradient - first
            inner = _inner(step, bend)
            pair = step, bend, torch.where(inner > 0, 1 / inner.clamp_min(1e-30), 0.0)
            now.pairs = [*now.pairs, pair][-self.history :]
            far = number == FIRST_REFRESH and worst > FAR
            if far or number % REFRESH == 0:
                precondition = self._preconditioner(now, slow=number >= SLOW)
                if number >= SLOW and precondition.scaled and bool((now.c == now.c[0]).all()):
                    first = torch.arange(len(now.c), device=now.c.device) == 0
                    self.dear = precondition.take(first)
        state.keep(active, now, precondition if whole else None)
        _, decrement = _direction(gradient, now.pairs, precondition)
        return active[decrement > bound] if len(decrement) == len(bound) else active

    def _move(
        self, now: "_State", direction: Tensor, decrement: Tensor, bound: Tensor, careful: bool
    ) -> tuple[Tensor, Tensor, bool]:
        """Step along the direction (K, Q, D); gradient and mean z^2 there, and whether a whole step was too long.

        Along it the slope rises from -decrement: far above 0 the minimum lies behind, where the secant says. Kept
        decision values give the slope without a product of the features, which is asked for first where `careful`.
        """
        weights, decision = now.weights, now.decision
        change = None if decision is None else self._product(direction)
        length, shortened = torch.ones_like(decrement), False
        for trial in range(30):
            now.weights = weights + length[:, None] * direction
            if decision is not None and change is not None:
                now.decision = decision + length[:, None] * change
            cheap = careful or trial > 0
            if cheap and change is not None:
                slope = self._slope(now, direction, change)
            else:
                gradient, spread = self._gradient(now)
                slope = _inner(gradient, direction)
            beyond = (slope > decrement / 2) & (decrement > bound)
            if not bool(beyond.any()):
                break
            shortened = True
            length = torch.where(beyond, length * (decrement / (slope + decrement)).clamp_min(0.1), length)
        if cheap and change is not None:
            gradient, spread = self._gradient(now)
        return gradient, spread, shortened

    def predicted(self, features: Tensor | None = None) -> Tensor:
        """Labels (Q, N) of the points fitted, or of other features (N, d), by every column."""
        if features is None:
            if self.state.decision is not None:
                return _labels(self.state.decision)
            return torch.cat([_labels(decision) for _, decision in self._decisions(self.state.weights)], 1)
        weight, bias = self.coefficients()
        rows = max(1, _at_once(features.device) // bias.numel())
        found = [_labels(weight @ part.T.to(weight) + bias[..., None]) for part in features.split(rows)]
        return torch.cat(found, 1)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Weight (K, Q, d) and bias (K, Q) for features as they were given, in float64."""
        weight = self.state.weights[..., :-1].double()
        if self.basis is not None:
            weight = weight @ self.basis.T
        return weight, self.state.weights[..., -1].double() - weight @ self.mean

    def _pieces(self, columns: int) -> Iterator[slice]:
        """Rows whose decision values by so many columns are worked on at a time."""
        rows = max(64, _at_once(self.x.device) // columns)
        return (slice(start, start + rows) for start in range(0, len(self.x), rows))

    def _decisions(self, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Decision values (K, Q, n) of pieces of the rows."""
        classes, columns, width = weights.shape
        flat = weights.reshape(-1, width)
        for piece in self._pieces(len(flat)):
            yield piece, (flat @ self.x[piece].T).view(classes, columns, -1)

    def _product(self, weights: Tensor) -> Tensor:
        """Decision values (K, Q, N) of all rows."""
        out = weights.new_empty(*weights.shape[:2], len(self.x))
        for piece, decision in self._decisions(weights):
            out[..., piece] = decision
        return out

    def _residuals(self, now: "_State") -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Mask times (p - target), (K, Q, n), of pieces of the rows, and z^2 (Q,)."""
        every = torch.equal(now.which, torch.arange(len(self.subsets), device=now.which.device))
        kept = now.decision
        if kept is None:
            pieces = self._decisions(now.weights)
        else:
            pieces = ((piece, kept[..., piece].contiguous()) for piece in self._pieces(self.columns * len(now.c)))
        for piece, decision in pieces:
            spread = torch.linalg.vecdot(decision, decision).sum(0)
            own = kept is None or decision.data_ptr() != kept.data_ptr()
            residual, y = _probabilities(decision if own else decision.clone()), self.y[piece]
            if self.columns == 1:
                residual -= y
            else:
                residual[y, :, torch.arange(len(y), device=y.device)] -= 1
            residual *= self.subsets[:, piece] if every else self.subsets[now.which, piece]
            yield piece, residual, spread

    def _gradient(self, now: "_State") -> tuple[Tensor, Tensor]:
        """Gradient of all columns (K, Q, D), sum over rows of mask * (p - target) * x and the ridge; mean z^2 (Q,)."""
        total = torch.zeros_like(now.weights)
        flat, spread = total.view(-1, total.shape[-1]), total.new_zeros(total.shape[1])
        for piece, residual, size in self._residuals(now):
            flat.addmm_(residual.view(len(flat), -1), self.x[piece])
            spread += size
        total.mul_(now.c[:, None]).add_(self.ridge * now.weights)
        return total, spread / (len(self.x) * self.columns)

    def _slope(self, now: "_State", direction: Tensor, change: Tensor) -> Tensor:
        """Inner product (Q,) of the gradient with a direction along which the decision values change by so much."""
        total = torch.zeros_like(now.c)
        for piece, residual, _ in self._residuals(now):
            total += _inner(residual, change[..., piece])
        return now.c * total + _inner(self.ridge * now.weights, direction)

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
    """Weights (K, Q, D) of the columns, their C (Q,), the problem (Q,) that each is, what is known of their curvature.

    A pair is a step s (K, Q, D), the change y of the gradient (K, Q, D) along it, and 1 / <s, y> (Q,). Decision values
    (K, Q, N) are kept where there is room for them, and replaced rather than written to.
    """

    weights: Tensor
    c: Tensor
    which: Tensor
    pairs: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    decision: Tensor | None = None
    precondition: Preconditioner | None = None

    def take(self, kept: Tensor) -> "_State":
        """Those columns (Q,) alone, without a preconditioner."""
        return _State(
            self.weights[:, kept],
            self.c[kept],
            self.which[kept],
            [(step[:, kept], bend[:, kept], inverse[kept]) for step, bend, inverse in self.pairs],
            None if self.decision is None else self.decision[:, kept],
        )

    def repeat(self, times: int) -> "_State":
        """Each column so many times."""
        every = torch.arange(len(self.c), device=self.c.device).repeat_interleave(times)
        state = self.take(every)
        state.precondition = None if self.precondition is None else self.precondition.repeat(times)
        return state

    def keep(self, active: Tensor, now: "_State", precondition: Preconditioner | None = None) -> None:
        """Take over the columns that are active now; with a preconditioner, which is of all, what else was learnt."""
        self.weights[:, active] = now.weights
        if now.decision is None:
            self.decision = None
        elif len(active) == len(self.c):
            self.decision = now.decision
        elif self.decision is not None:
            self.decision = self.decision.index_copy(1, active, now.decision)
        if precondition is not None:
            self.pairs, self.precondition = now.pairs, precondition


def _probabilities(decision: Tensor) -> Tensor:
    """In place, from decision values (K, Q, N)."""
    if len(decision) == 1:
        return decision.sigmoid_()
    decision -= decision.amax(0)
    decision.exp_()
    decision /= decision.sum(0)
    return decision


def _at_once(device: torch.device) -> int:
    """Logits that are worked on at a time."""
    return IN_CACHE if device.type == "cpu" else KEPT


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
