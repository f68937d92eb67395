"""Row statistics: functions of each row of the similarity matrix that an objective can use.

A statistic of row i is a function of sums over its negatives, `sum_j f(s_ij)`. This file defines the functions f. The
engine adds them up. A new statistic is a frozen dataclass with `parts`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import hardshrink, softplus

__all__ = [
    "AnyStatistic", "Between", "Count", "Extreme", "LearnedLogSumExp", "LearnedSoftplus", "LogSumExp", "SoftmaxMean",
    "Softplus", "Statistic", "Sum", "log_sum_exp", "softplus_sum",
]  # fmt: skip

Parts = Tensor | tuple[Tensor, ...]

# exp(scale * s) is summed without a row maximum while |scale * s| stays below this.
SAFE_EXPONENT = 60.0
# The maximum of a row without entries. It is finite, so that the difference of two maxima is a number.
LOWEST = -1e30
# Below these, exp gives subnormal numbers. They are slow, and negligible next to the 1 of a row's maximum.
SMALLEST_EXPONENT = {
    dtype: float(math.ceil(math.log(torch.finfo(dtype).tiny))) for dtype in (torch.float32, torch.float64)
}
# softplus becomes linear above this. At 50 the difference is below the resolution of float64.
LINEAR = 50
SECOND_DERIVATIVES = (
    "this similarity matrix is computed in tiles, which have no second derivatives (create_graph=True). Set "
    "DIPOLE_ENGINE=dense to compute it as one matrix, in memory for all anchors times candidates. Below 2^20 "
    "entries this is the default."
)


class Statistic:
    """A function of sums over the negatives of a row. A subclass is a frozen dataclass that defines `parts`.

    `parts` and `slopes` are elementwise, for any shape, and must not write to their arguments. They need not handle
    excluded entries (an anchor itself, its positives, ignored candidates). There they see the real similarity or 0,
    and the engine discards what they return, even if it is infinite.

    Example:
        >>> class Squares(dipole.Statistic):
        ...     def parts(self, s, e):
        ...         return s**2
        >>> Squares().parts(torch.tensor([0.5, -1.0]), None)
        tensor([0.2500, 1.0000])
    """

    scale: ClassVar[float | None] = None
    """With a scale, `e` below is e^{scale * s - shift}. The shift is 0, or the row's maximum if the exponent may be
    large. Every part must then be a multiple of e."""
    learned: ClassVar[bool] = False
    """The statistic holds learned numbers. No kernel supports them, because reading them would wait for the device."""
    empty: ClassVar[float | None] = None
    """The value of a row without negatives. With None `finish` gives it, from sums of 0."""
    kernel: ClassVar[str | tuple[Any, Any] | None] = None
    """Two `@triton.jit` functions, (value, slope), that compute `parts` and `slopes` in the fused kernels of a GPU. A
    name selects functions that dipole provides. With None the statistic runs in tiles (docs/how-to/own-losses.md)."""

    @property
    def exact(self) -> "Statistic":
        """The same statistic for autograd, which differentiates learned numbers by itself."""
        return self

    def parts(self, s: Tensor, e: Any) -> Parts:
        """Return the summand f(s), or a tuple of several.

        Args:
            s: similarities, (...) of any shape. Do not write to it.
            e: e^{scale * s - shift}, (...) of the same shape. None without a scale.

        Returns:
            A tensor of that shape, (...), or a tuple of such tensors.
        """
        raise NotImplementedError

    def slopes(self, s: Tensor, e: Any) -> Parts:
        """Return the derivative f'(s) of each part. The default uses autograd.

        Args:
            s: as in `parts`.
            e: as in `parts`.

        Returns:
            (...), or a tuple of such tensors, like `parts`.
        """
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (s, e) if t is not None]
            parts = as_tuple(self.parts(inputs[0], None if e is None else inputs[1]))
        slopes = []
        for part in parts:
            if not part.requires_grad:
                slopes.append(torch.zeros_like(s))
                continue
            by = torch.autograd.grad(part, inputs, torch.ones_like(part), True, materialize_grads=True)
            if e is None:
                slopes.append(by[0])
            else:  # e' = scale e
                slopes.append(torch.addcmul(by[0], by[1], e, value=self.scale or 0.0))
        return tuple(slopes)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        """Return the statistic, (A,), from the sums of its parts. The default returns the first sum.

        Args:
            sums: (A,) for each part, with gradient.
            shift: (A,) subtracted in the exponent of e, or 0.
            count: (A,) number of negatives.
        """
        return sums[0]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "parts" in cls.__dict__ and "kernel" not in cls.__dict__:  # an inherited one would compute something else
            cls.kernel = None


def finished(
    statistic: Statistic, sums: Sequence[Tensor], shift: Tensor, counts: Tensor, none_empty: bool = False
) -> Tensor:
    """Return a statistic, (A,), from its sums and the numbers of negatives, (A,).

    A row without negatives has no gradient. `none_empty` says that there is none.
    """
    if none_empty:
        return statistic.finish(tuple(sums), shift, counts)
    empty = counts == 0
    if statistic.empty is None:
        return statistic.finish(tuple([each.masked_fill(empty, 0.0) for each in sums]), shift, counts)
    filled = tuple([each.masked_fill(empty, 1.0) for each in sums])
    return statistic.finish(filled, shift, counts).masked_fill(empty, statistic.empty)


def as_tuple(parts: Parts) -> tuple[Tensor, ...]:
    """Return one part or several as a tuple."""
    if isinstance(parts, Tensor):
        return (parts,)
    return parts


def part_count(statistic: Statistic) -> int:
    """Return how many sums a statistic has."""
    s = torch.zeros(0, 0)
    return len(as_tuple(statistic.parts(s, None if statistic.scale is None else s)))


def needs_maximum(statistic: Statistic, bound: float | None) -> bool:
    """Return whether each row's maximum is subtracted in the exponent, for similarities up to the bound."""
    if statistic.scale is None:
        return False
    return statistic.learned or bound is None or abs(statistic.scale) * bound > SAFE_EXPONENT


@dataclass(frozen=True)
class LogSumExp(Statistic):
    """log sum_j e^{scale s_ij}, (A,). A row without negatives gives -inf.

    Args:
        scale: a finite number, 1 / tau for a temperature tau. For a learned one see `log_sum_exp`.

    Example:
        >>> {"negatives": dipole.LogSumExp(1 / 0.5)}  # in `Objective.statistics`
        {'negatives': LogSumExp(scale=2.0)}
    """

    scale: float  # type: ignore[misc]

    empty: ClassVar[float | None] = -math.inf
    kernel: ClassVar[str] = "log_sum_exp"

    def parts(self, s: Tensor, e: Tensor) -> Tensor:
        return e

    def slopes(self, s: Tensor, e: Tensor) -> Tensor:
        return self.scale * e

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        if shift.ndim:
            return sums[0].log() + shift
        return sums[0].log()  # nothing was subtracted


@dataclass(frozen=True, eq=False)
class LearnedLogSumExp(Statistic):
    """log sum_j e^{u s_ij}, (A,), with a gradient of u, the softmax mean of s. A row without negatives gives -inf.

    Args:
        u: the learned scale, (), > 0.

    Example:
        >>> dipole.LearnedLogSumExp(torch.tensor(10.0, requires_grad=True)).learned
        True
    """

    u: Tensor
    learned: ClassVar[bool] = True
    empty: ClassVar[float | None] = -math.inf

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """u without its gradient, ()."""
        return self.u.detach()

    @property
    def exact(self) -> Statistic:
        return LogSumExp(self.u)  # type: ignore[arg-type]

    def parts(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return e, s * e

    def slopes(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        first = self.scale * e
        return first, torch.addcmul(e, s, first)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        return sums[0].log() + shift + _with_slope(self.u, sums[1] / sums[0])


def log_sum_exp(scale: float | Tensor) -> Statistic:
    """Return log sum_j e^{scale s_ij}, (A,), as a statistic. A learned scale gets a gradient.

    Args:
        scale: a number, or a learned one, (), > 0.
    """
    if isinstance(scale, Tensor):
        return LearnedLogSumExp(scale)
    return LogSumExp(scale)


def _with_slope(number: float | Tensor, derivative: Tensor) -> Tensor | float:
    """Return 0 with a given derivative by a learned number, which the sums of tiles do not differentiate."""
    if isinstance(number, Tensor):
        return (number - number.detach()) * derivative
    return 0.0


def _value(number: float | Tensor) -> float | Tensor:
    if isinstance(number, Tensor):
        return number.detach()
    return number


@dataclass(frozen=True)
class SoftmaxMean(Statistic):
    """sum_j s_ij e^{scale s_ij} / sum_j e^{scale s_ij}, (A,). A row without negatives gives 0.

    Args:
        scale: a finite number.

    Example:
        >>> {"hardness": dipole.SoftmaxMean(1 / 0.5)}  # in `Objective.statistics`
        {'hardness': SoftmaxMean(scale=2.0)}
    """

    scale: float  # type: ignore[misc]

    empty: ClassVar[float | None] = 0.0
    kernel: ClassVar[str] = "softmax_mean"

    def parts(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return e, s * e

    def slopes(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * e, torch.addcmul(e, s, e, value=self.scale)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        return sums[1] / sums[0]


@dataclass(frozen=True)
class Sum(Statistic):
    """sum_j s_ij, (A,). A row without negatives gives 0.

    Example:
        >>> dipole.Sum().parts(torch.tensor([0.5, -1.0]), None)
        tensor([ 0.5000, -1.0000])
    """

    kernel: ClassVar[str] = "plain_sum"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return s


@dataclass(frozen=True)
class Between(Statistic):
    """sum_j max((high - s_ij)(s_ij - low), 0), (A,): how far inside an interval the similarities lie.

    Args:
        low: lower end of the interval.
        high: upper end, above `low`.

    Example:
        >>> dipole.Between(0.0, 0.5).parts(torch.tensor([-0.5, 0.25, 0.75]), None)
        tensor([0.0000, 0.0625, 0.0000])
    """

    low: float
    high: float

    kernel: ClassVar[str] = "between"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return (self.high - s).mul(s - self.low).relu_()

    def slopes(self, s: Tensor, e: Any) -> Tensor:
        slope = torch.rsub(s, self.low + self.high, alpha=2)  # low + high - 2 s
        return slope.sub_(hardshrink(slope, self.high - self.low))  # 0 outside, where |slope| > high - low


@dataclass(frozen=True)
class Softplus(Statistic):
    """sum_j log(1 + e^{slope s_ij + bias}), (A,), the sum of a logistic loss. A row without negatives gives 0.

    Args:
        slope: a finite number. For learned ones see `softplus_sum`.
        bias: a finite number.

    Example:
        >>> dipole.Softplus(1.0, 0.0).parts(torch.zeros(1), None)  # log 2
        tensor([0.6931])
    """

    slope: float
    bias: float

    kernel: ClassVar[str] = "softplus"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return softplus(self.slope * s + self.bias, threshold=LINEAR)

    def slopes(self, s: Tensor, e: Any) -> Tensor:
        return self.slope * torch.sigmoid(self.slope * s + self.bias)


@dataclass(frozen=True, eq=False)
class LearnedSoftplus(Statistic):
    """sum_j log(1 + e^{slope s_ij + bias}), (A,), with a gradient of the learned numbers.

    Args:
        slope: a number, or a learned one, ().
        bias: a number, or a learned one, ().

    Example:
        >>> dipole.LearnedSoftplus(10.0, torch.tensor(-5.0, requires_grad=True)).learned
        True
    """

    slope: float | Tensor
    bias: float | Tensor
    learned: ClassVar[bool] = True

    @property
    def exact(self) -> Statistic:
        return Softplus(self.slope, self.bias)  # type: ignore[arg-type]

    def parts(self, s: Tensor, e: Any) -> tuple[Tensor, Tensor, Tensor]:
        logit = _value(self.slope) * s + _value(self.bias)
        share = torch.sigmoid(logit)
        return softplus(logit, threshold=LINEAR), share * s, share

    def slopes(self, s: Tensor, e: Any) -> tuple[Tensor, Tensor, Tensor]:
        slope = _value(self.slope)
        share = torch.sigmoid(slope * s + _value(self.bias))
        steep = slope * share * (1 - share)
        return slope * share, torch.addcmul(share, s, steep), steep

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        return sums[0] + _with_slope(self.slope, sums[1]) + _with_slope(self.bias, sums[2])


def softplus_sum(slope: float | Tensor, bias: float | Tensor) -> Statistic:
    """Return sum_j log(1 + e^{slope s_ij + bias}), (A,), as a statistic. Learned numbers get a gradient.

    Args:
        slope: a number, or a learned one, ().
        bias: a number, or a learned one, ().
    """
    if isinstance(slope, Tensor) or isinstance(bias, Tensor):
        return LearnedSoftplus(slope, bias)
    return Softplus(slope, bias)


@dataclass(frozen=True)
class Count(Statistic):
    """Number of negatives with low < s_ij < high, (A,), in the dtype of the similarities, without gradient.

    Args:
        low: lower end of the interval, exclusive.
        high: upper end of the interval, exclusive.

    Example:
        >>> dipole.Count(0.0, 0.5).parts(torch.tensor([-0.5, 0.25, 0.75]), None)
        tensor([0., 1., 0.])
    """

    low: float
    high: float

    kernel: ClassVar[str] = "count"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return ((s > self.low) & (s < self.high)).to(s.dtype)


@dataclass(frozen=True)
class Extreme:
    """Index of the negative with the largest (or smallest) similarity, (A,) torch.long. -1 without negatives.

    An index has no gradient. `rows.similarity(index.unsqueeze(1))` gives the similarity itself, (A, 1), with gradient.

    Args:
        largest: False for the smallest.

    Example:
        >>> {"hardest": dipole.Extreme()}  # in `Objective.statistics`
        {'hardest': Extreme(largest=True)}
    """

    largest: bool = True

    @property
    def sign(self) -> int:
        """Return 1 for the largest similarity and -1 for the smallest."""
        return 2 * self.largest - 1


AnyStatistic = Statistic | Extreme
"""What `Objective.statistics` may return."""
