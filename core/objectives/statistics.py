"""Row statistics: what an objective may ask of each row of the similarity matrix.

A statistic of row i is a function of sums over its negatives, `sum_j f(s_ij)`; here stand the functions f, and
`sweep.row_statistics` adds them up. A new one is a frozen dataclass with `parts`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import hardshrink, softplus

__all__ = [
    "AnyStatistic",
    "Between",
    "Count",
    "Extreme",
    "LearnedLogSumExp",
    "LearnedSoftplus",
    "LogSumExp",
    "SoftmaxMean",
    "Softplus",
    "Statistic",
    "Sum",
    "log_sum_exp",
    "softplus_sum",
]

Parts = Tensor | tuple[Tensor, ...]

SECOND_DERIVATIVES = (
    "this similarity matrix is computed in tiles, which have no second derivatives (create_graph=True). Use at most "
    "2^20 anchor-candidate pairs, which are computed as one matrix: smaller batches, or fewer candidates."
)


class Statistic:
    """A function of sums over the negatives of a row. A subclass is a frozen dataclass that defines `parts` alone.

    `parts` and `slopes` are elementwise, in any shape, and must not write to their arguments. Excluded entries (an
    anchor itself, its positives, what is dropped) are no concern of theirs: they see the real similarity there as well,
    and the sweep takes out whatever they return, be it infinite.
    """

    scale: ClassVar[float | None] = None
    """With one, `e` below is e^{scale * s - shift}; the shift is 0 or, where the exponent may be large, the row's
    maximum. Every part must then be a multiple of e."""
    learned: ClassVar[bool] = False
    """It holds learned numbers, which lie on the device: nobody reads them to choose a way, and no kernel has them."""
    kernel: ClassVar[str | tuple[Any, Any] | None] = None
    """Two `@triton.jit` functions, (value, slope), that compute `parts` and `slopes` in the fused kernels of a GPU. A
    name stands for functions of dipole's own. With None the statistic runs in tiles. See docs/own-losses.md."""

    @property
    def form(self) -> "Statistic":
        """What has parts alike and holds no tensor, to be remembered by."""
        return self

    def parts(self, s: Tensor, e: Any) -> Parts:
        """The summand f(s), or a tuple of several.

        Args:
            s: similarities, (...) of any shape; not to be written to.
            e: e^{scale * s - shift}, (...) of the same shape; None without a scale.

        Returns:
            A tensor of that shape, (...), or a tuple of such.
        """
        raise NotImplementedError

    def slopes(self, s: Tensor, e: Any) -> Parts:
        """The derivative f'(s) of each part, by autograd unless a subclass knows a shorter way.

        Args:
            s: as of `parts`.
            e: as of `parts`.

        Returns:
            (...), or a tuple of such, as `parts`.
        """
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (s, e) if t is not None]
            parts = as_tuple(self.parts(inputs[0], None if e is None else inputs[1]))
        slopes = []
        for part in parts:
            if part.requires_grad:
                by = torch.autograd.grad(part, inputs, torch.ones_like(part), True, materialize_grads=True)
                # e' = scale e
                slopes.append(by[0] if e is None else torch.addcmul(by[0], by[1], e, value=self.scale or 0.0))
            else:
                slopes.append(torch.zeros_like(s))
        return tuple(slopes)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        """The statistic (A,) from the sums of its parts, each (A,), with gradient; by default the first sum.

        Args:
            sums: (A,) for each part.
            shift: (A,) that was subtracted in the exponent of e; 0 without a scale.
            count: (A,) number of negatives.
        """
        return sums[0]

    def finish_full(self, sums: tuple[Tensor, ...], shift: Tensor | None, count: Tensor) -> Tensor:
        """The same where every row has a negative, so that none is masked, (A,).

        Args:
            sums: (A,) for each part.
            shift: (A,), or None for 0.
            count: (A,) number of negatives.
        """
        return self.finish(sums, sums[0].new_zeros(()) if shift is None else shift, count)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "parts" in cls.__dict__ and "kernel" not in cls.__dict__:  # an inherited one would compute something else
            cls.kernel = None
        if "finish" in cls.__dict__ and "finish_full" not in cls.__dict__:  # what it inherits would be another's
            cls.finish_full = Statistic.finish_full  # type: ignore[method-assign]


def as_tuple(parts: Parts) -> tuple[Tensor, ...]:
    """One part or several as several."""
    return (parts,) if isinstance(parts, Tensor) else parts


@dataclass(frozen=True)
class LogSumExp(Statistic):
    """log sum_j e^{scale s_ij}, (A,); -inf for a row without negatives.

    Args:
        scale: a finite number, 1 / tau for a temperature tau; for a learned one see `log_sum_exp`.
    """

    scale: float  # type: ignore[misc]

    kernel: ClassVar[str] = "log_sum_exp"

    def parts(self, s: Tensor, e: Tensor) -> Tensor:
        return e

    def slopes(self, s: Tensor, e: Tensor) -> Tensor:
        return self.scale * e

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        none = count == 0
        return (sums[0].masked_fill(none, 1.0).log() + shift).masked_fill(none, -math.inf)

    def finish_full(self, sums: tuple[Tensor, ...], shift: Tensor | None, count: Tensor) -> Tensor:
        return sums[0].log() if shift is None else sums[0].log() + shift


@dataclass(frozen=True, eq=False)
class LearnedLogSumExp(Statistic):
    """log sum_j e^{u s_ij}, (A,), with a gradient of u, the softmax mean of s; -inf without negatives.

    Args:
        u: the learned scale, (), > 0.
    """

    u: Tensor
    learned: ClassVar[bool] = True

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """u without its gradient, ()."""
        return self.u.detach()

    @property
    def form(self) -> Statistic:
        return SoftmaxMean(1.0)

    def parts(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return e, s * e

    def slopes(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        first = self.scale * e
        return first, torch.addcmul(e, s, first)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        none = count == 0
        total = sums[0].masked_fill(none, 1.0)
        return (total.log() + shift + carried(self.u, sums[1] / total)).masked_fill(none, -math.inf)


def log_sum_exp(scale: float | Tensor) -> Statistic:
    """log sum_j e^{scale s_ij}, (A,), of a fixed scale, or of a learned one, which then has a gradient.

    Args:
        scale: a number, or the learned one, (), > 0.
    """
    return LearnedLogSumExp(scale) if isinstance(scale, Tensor) else LogSumExp(scale)


def carried(number: float | Tensor, derivative: Tensor) -> Tensor | float:
    """0 whose derivative by a learned number is given: the sums themselves know nothing of it.

    The given one may be differentiated by the similarities once more, but not by the number.
    """
    return (number - number.detach()) * derivative if isinstance(number, Tensor) else 0.0


def _value(number: float | Tensor) -> float | Tensor:
    return number.detach() if isinstance(number, Tensor) else number


@dataclass(frozen=True)
class SoftmaxMean(Statistic):
    """sum_j s_ij e^{scale s_ij} / sum_j e^{scale s_ij}, (A,); 0 for a row without negatives.

    Args:
        scale: a finite number.
    """

    scale: float  # type: ignore[misc]

    kernel: ClassVar[str] = "softmax_mean"

    def parts(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return e, s * e

    def slopes(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * e, torch.addcmul(e, s, e, value=self.scale)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        none = count == 0
        return (sums[1] / sums[0].masked_fill(none, 1.0)).masked_fill(none, 0.0)

    def finish_full(self, sums: tuple[Tensor, ...], shift: Tensor | None, count: Tensor) -> Tensor:
        return sums[1] / sums[0]


@dataclass(frozen=True)
class Sum(Statistic):
    """sum_j s_ij, (A,); 0 for a row without negatives."""

    kernel: ClassVar[str] = "plain_sum"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return s


@dataclass(frozen=True)
class Between(Statistic):
    """sum_j max((high - s_ij)(s_ij - low), 0), (A,): how far inside an interval the similarities lie.

    Args:
        low: lower end of the interval.
        high: upper end, above `low`.
    """

    low: float
    high: float

    kernel: ClassVar[str] = "between"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return (self.high - s).mul_(s - self.low).relu_()

    def slopes(self, s: Tensor, e: Any) -> Tensor:
        slope = torch.rsub(s, self.low + self.high, alpha=2)  # low + high - 2 s
        return slope.sub_(hardshrink(slope, self.high - self.low))  # 0 outside, where |slope| > high - low


@dataclass(frozen=True)
class Softplus(Statistic):
    """sum_j log(1 + e^{slope s_ij + bias}), (A,): what a logistic loss adds up; 0 for a row without negatives.

    Args:
        slope: a finite number; for learned ones see `softplus_sum`.
        bias: a finite number.
    """

    slope: float
    bias: float

    kernel: ClassVar[str] = "softplus"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return softplus(self.slope * s + self.bias)

    def slopes(self, s: Tensor, e: Any) -> Tensor:
        return self.slope * torch.sigmoid(self.slope * s + self.bias)


@dataclass(frozen=True, eq=False)
class LearnedSoftplus(Statistic):
    """sum_j log(1 + e^{slope s_ij + bias}), (A,), with a gradient of what is learned.

    Args:
        slope: a number, or a learned one, ().
        bias: a number, or a learned one, ().
    """

    slope: float | Tensor
    bias: float | Tensor
    learned: ClassVar[bool] = True

    @property
    def form(self) -> Statistic:
        return _LOGISTIC

    def parts(self, s: Tensor, e: Any) -> tuple[Tensor, Tensor, Tensor]:
        logit = _value(self.slope) * s + _value(self.bias)
        share = torch.sigmoid(logit)
        return softplus(logit), share * s, share

    def slopes(self, s: Tensor, e: Any) -> tuple[Tensor, Tensor, Tensor]:
        slope = _value(self.slope)
        share = torch.sigmoid(slope * s + _value(self.bias))
        steep = slope * share * (1 - share)
        return slope * share, torch.addcmul(share, s, steep), steep

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        return sums[0] + carried(self.slope, sums[1]) + carried(self.bias, sums[2])


_LOGISTIC = LearnedSoftplus(1.0, 0.0)


def softplus_sum(slope: float | Tensor, bias: float | Tensor) -> Statistic:
    """sum_j log(1 + e^{slope s_ij + bias}), (A,), with gradients of what is learned.

    Args:
        slope: a number, or a learned one, ().
        bias: a number, or a learned one, ().
    """
    if isinstance(slope, Tensor) or isinstance(bias, Tensor):
        return LearnedSoftplus(slope, bias)
    return Softplus(slope, bias)


@dataclass(frozen=True)
class Count(Statistic):
    """Number of negatives with low < s_ij < high, (A,), in the dtype of the similarities; without gradient.

    Args:
        low: lower end of the interval, outside it.
        high: upper end of the interval, outside it.
    """

    low: float
    high: float

    kernel: ClassVar[str] = "count"

    def parts(self, s: Tensor, e: Any) -> Tensor:
        return ((s > self.low) & (s < self.high)).to(s.dtype)


@dataclass(frozen=True)
class Extreme:
    """Index of the negative with the largest (or smallest) similarity, (A,) torch.long; -1 for a row without negatives.

    An index has no gradient: `rows.similarity(index.unsqueeze(1))` gives the similarity itself, (A, 1), as the
    positives are.

    Args:
        largest: False for the smallest.
    """

    largest: bool = True


AnyStatistic = Statistic | Extreme
"""What `Objective.statistics` may ask for."""
