"""The statistics as Triton functions: `value(s, e, numbers)` and `slope(s, e, numbers)`.

Both work on one tile of similarities and return a tuple with one entry for each sum. If the statistic has a scale, `e`
is e^{scale s - shift}. `numbers` holds the statistic's numbers, its scale first. The slope is d value / d s, with
e' = scale e. A function sees the real similarity at excluded entries, and the kernel discards what it returns there.
"""

from typing import Any

import triton
import triton.language as tl

from dipole.core.objectives.statistics import Statistic


@triton.jit
def log_sum_exp(s, e, numbers):
    return (e,)


@triton.jit
def log_sum_exp_slope(s, e, numbers):
    return (numbers[0] * e,)


@triton.jit
def softmax_mean(s, e, numbers):
    return e, s * e


@triton.jit
def softmax_mean_slope(s, e, numbers):
    return numbers[0] * e, e + numbers[0] * s * e


@triton.jit
def plain_sum(s, e, numbers):
    return (s,)


@triton.jit
def plain_sum_slope(s, e, numbers):
    return (tl.full(s.shape, 1.0, tl.float32),)


@triton.jit
def between(s, e, numbers):
    return (tl.maximum((numbers[1] - s) * (s - numbers[0]), 0.0),)


@triton.jit
def between_slope(s, e, numbers):
    return (tl.where((s > numbers[0]) & (s < numbers[1]), numbers[0] + numbers[1] - 2.0 * s, 0.0),)


@triton.jit
def log1p(x):
    """Return log(1 + x), exact for small x."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def softplus(s, e, numbers):
    x = numbers[0] * s + numbers[1]
    return (tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x))),)


@triton.jit
def softplus_slope(s, e, numbers):
    return (numbers[0] * tl.sigmoid(numbers[0] * s + numbers[1]),)


@triton.jit
def count(s, e, numbers):
    return (tl.where((s > numbers[0]) & (s < numbers[1]), 1.0, 0.0),)


@triton.jit
def count_slope(s, e, numbers):
    return (tl.full(s.shape, 0.0, tl.float32),)


def functions_of(statistic: Statistic) -> tuple[Any, Any]:
    """Return the value and slope functions of a statistic."""
    kernel = statistic.kernel
    if isinstance(kernel, str):
        return globals()[kernel], globals()[f"{kernel}_slope"]
    assert kernel is not None
    return kernel
