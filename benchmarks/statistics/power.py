"""How many seeds show a difference: exact, by integrating over the spreads that samples may have."""

from bisect import bisect_left
from functools import cache, lru_cache
from math import isfinite, nan, sqrt

import numpy as np
from scipy import special
from scipy.optimize import brentq

from dipole.core.evaluation.intervals import Array

NODES = 64
ROUNDING = 1e-9
"""A power is reached up to this, so that the seeds needed for a detectable difference are those that detect it."""
FEW = 100
"""Up to so many seeds the degrees of freedom of Welch's test are integrated. Beyond, they are 2 (n - 1)."""


def power(difference: float, std: float, n: int, alpha: float = 0.05, is_paired: bool = False) -> float:
    """Power of the two-sided test that `difference` makes, from 0 to 1. One seed has none.

    Pairs have the t-test of n - 1 degrees of freedom. Two arms of equal spread have Welch's test, whose degrees of
    freedom are estimated too and vary from n - 1 to 2 (n - 1).

    Args:
        difference: of the two means.
        std: spread of one arm, or of the differences by seed where `is_paired`. >= 0.
        n: seeds of each arm.
        alpha: level of the test, in (0, 1).
        is_paired: whether arms are paired by seed.
    """
    if n < 2:
        return 0.0
    if std == 0:
        return alpha if difference == 0 else 1.0
    size = n if is_paired else n / 2
    shift = abs(difference) / std * sqrt(size)
    smallest, share = _smallest_significant(n, alpha, is_paired)
    return _power(shift, smallest, share)


def _power(shift: float, smallest: Array, share: Array) -> float:
    return min(1.0, float(share @ (special.ndtr(shift - smallest) + special.ndtr(-shift - smallest))))


@lru_cache(maxsize=1024)
def _smallest_significant(n: int, alpha: float, is_paired: bool) -> tuple[Array, Array]:
    """Return the smallest significant differences in true standard errors, and the probability of each."""
    if is_paired:
        return _of_t_test(n - 1, alpha)
    if n > FEW:
        return _of_t_test(2 * (n - 1), alpha)
    spread, share = _spreads(n - 1)
    one, other = spread[:, None] ** 2, spread[None, :] ** 2
    df = (n - 1) * (one + other) ** 2 / (one**2 + other**2)
    smallest = np.sqrt((one + other) / 2) * special.stdtrit(df, 1 - alpha / 2)
    return smallest.ravel(), (share[:, None] * share).ravel()


def _of_t_test(df: float, alpha: float) -> tuple[Array, Array]:
    spread, share = _spreads(df)
    return spread * special.stdtrit(df, 1 - alpha / 2), share


def _spreads(df: float) -> tuple[Array, Array]:
    """Return spreads s that samples may have, where 1 is the true one, and the probability of each.

    s sqrt(df) has a chi distribution. The spreads are Gauss-Legendre nodes.
    """
    low, high = (sqrt(special.chdtri(df, tail) / df) for tail in (1 - 1e-13, 1e-13))
    places, weights = _legendre()
    spread = low + (high - low) * (places + 1) / 2
    log_density = (df - 1) * np.log(spread) - df * spread**2 / 2
    share = weights * np.exp(log_density - log_density.max())
    return spread, share / share.sum()


@cache
def _legendre() -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(NODES)


def detectable(std: float, n: int, target: float = 0.8, alpha: float = 0.05, is_paired: bool = False) -> float:
    """Return the smallest difference that n seeds of each arm show with probability `target`, or nan below two seeds.

    Args:
        std: as of `power`.
        n: as of `power`.
        target: probability of showing it, in (alpha, 1).
        alpha: as of `power`.
        is_paired: as of `power`.
    """
    if n < 2 or not isfinite(std):
        return nan
    size = n if is_paired else n / 2
    return std / sqrt(size) * _least_shift_of(n, target, alpha, is_paired)


@lru_cache(maxsize=1024)
def _least_shift_of(n: int, target: float, alpha: float, is_paired: bool) -> float:
    return _least_shift(*_smallest_significant(n, alpha, is_paired), target)


@lru_cache(maxsize=1024)
def least_shift(df: float) -> float:
    """Return how many standard errors a quantity has to be from 0 for 80 % power of a two-sided t-test at 0.05."""
    return _least_shift(*_of_t_test(df, 0.05), 0.8)


def _least_shift(smallest: Array, share: Array, target: float) -> float:
    return float(brentq(lambda shift: _power(shift, smallest, share) - target, 0.0, smallest.max() + 40, rtol=1e-12))


def seeds_needed(
    difference: float,
    std: float,
    target: float = 0.8,
    alpha: float = 0.05,
    is_paired: bool = False,
    limit: int = 1_000_000,
) -> int | None:
    """Smallest number of seeds of each arm that shows a difference. None for no difference, and beyond the limit.

    Args:
        difference: of the two means.
        std: as of `power`.
        target: probability of showing it, in (0, 1).
        alpha: as of `power`.
        is_paired: as of `power`.
        limit: most seeds.
    """
    if not (isfinite(difference) and isfinite(std)) or std < 0 or difference == 0:
        return None
    seeds = range(2, limit + 1)
    place = bisect_left(seeds, True, key=lambda n: power(difference, std, n, alpha, is_paired) >= target - ROUNDING)
    return seeds[place] if place < len(seeds) else None


def pooled_std(std_a: float, std_b: float) -> float:
    """Root of the mean variance of two arms of equal size: the spread `seeds_needed` wants for two printed cells.

    Args:
        std_a: of the one arm, >= 0.
        std_b: of the other, >= 0.
    """
    return sqrt((std_a**2 + std_b**2) / 2)
