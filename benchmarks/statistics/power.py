"""How many seeds show a difference: exact, from the noncentral t distribution."""

from bisect import bisect_left
from functools import lru_cache
from math import isfinite, isnan, nan, sqrt

import numpy as np
from scipy import special
from scipy.optimize import brentq

from dipole.benchmarks.statistics.differences import PairedTest
from dipole.core.evaluation.intervals import Array
from dipole.core.utils.errors import DataError

POWER = 0.8
"""Probability with which planned seeds show a difference."""
NODES = 64
ROUNDING = 1e-9
"""A power is reached up to this, so that the seeds needed for a detectable difference are those that detect it."""


def power(
    difference: float, std: float, n: int, alpha: float = 0.05, is_paired: bool = False, other: int | None = None
) -> float:
    """Power of the two-sided test that `difference` makes, from 0 to 1. One seed has none.

    Pairs have the t-test of n - 1 degrees of freedom. Two arms of equal spread have Welch's test, whose degrees of
    freedom are estimated too and vary from the smaller n - 1 to their sum.

    Args:
        difference: of the two means.
        std: spread of one arm, or of the differences by seed where `is_paired`. >= 0.
        n: seeds of each arm.
        alpha: level of the test, in (0, 1).
        is_paired: whether arms are paired by seed.
        other: seeds of the second arm. Default: n.

    Raises:
        DataError: std is negative, or alpha not in its range.
    """
    other = other or n
    if isnan(difference + std):
        return nan
    if min(n, other) < 2:
        return 0.0
    if std == 0:
        return alpha if difference == 0 else 1.0
    if std < 0:
        raise DataError(f"std is a spread, 0 or more, got {std}.")
    shift = abs(difference) / std * sqrt(_size(n, other, is_paired))
    return _power(shift, *_critical(n, other, alpha, is_paired))


def _size(n: float, other: float, is_paired: bool) -> float:
    return n if is_paired else n * other / (n + other)


def _power(shift: float, critical: Array, share: Array, df: float) -> float:
    """P(|T| > c) of T noncentral by `shift`. scipy answers nan where the tail beyond c is 1, and that below -c is 0."""
    above = 1 - np.nan_to_num(special.nctdtr(df, shift, critical))
    below = np.nan_to_num(1 - special.nctdtr(df, -shift, critical))
    return min(1.0, float(share @ (above + below)))


@lru_cache(maxsize=1024)
def _critical(n: float, other: float, alpha: float, is_paired: bool) -> tuple[Array, Array, float]:
    """Return critical values of a t statistic, the probability of each, and the statistic's degrees of freedom.

    The first arm's share of the sum of squares, sin^2 of an angle, has a beta distribution and is independent of the
    sum. It sets Welch's degrees of freedom and how far his error is from the true one.
    """
    if not 0 < alpha < 1:
        raise DataError(f"alpha is the level of a test, above 0 and below 1, got {alpha}.")
    if is_paired:
        return np.array([special.stdtrit(n - 1, 1 - alpha / 2)]), np.ones(1), n - 1
    df = n + other - 2
    low, high = np.arcsin(np.sqrt(special.betaincinv((n - 1) / 2, (other - 1) / 2, [1e-13, 1 - 1e-13])))
    places, weights = np.polynomial.legendre.leggauss(NODES)
    angle = low + (high - low) * (places + 1) / 2
    density = (n - 2) * np.log(np.sin(angle)) + (other - 2) * np.log(np.cos(angle))
    share = weights * np.exp(density - density.max())
    one, two = np.sin(angle) ** 2 / (n * (n - 1)), np.cos(angle) ** 2 / (other * (other - 1))
    of_welch = (one + two) ** 2 / (one**2 / (n - 1) + two**2 / (other - 1))
    error = np.sqrt(df * (one + two) * _size(n, other, False))
    return error * special.stdtrit(of_welch, 1 - alpha / 2), share / share.sum(), float(df)


def detectable(
    std: float, n: int, target: float = POWER, alpha: float = 0.05, is_paired: bool = False, other: int | None = None
) -> float:
    """Return the smallest difference that n seeds of each arm show with probability `target`, or nan below two seeds.

    Args:
        std: as of `power`.
        n: as of `power`.
        target: probability of showing it, in (alpha, 1).
        alpha: as of `power`.
        is_paired: as of `power`.
        other: as of `power`.

    Raises:
        DataError: as `power`, or target is not in its range.
    """
    other = other or n
    if min(n, other) < 2 or not isfinite(std):
        return nan
    if std < 0:
        raise DataError(f"std is a spread, 0 or more, got {std}.")
    return std / sqrt(_size(n, other, is_paired)) * _least_shift(n, other, target, alpha, is_paired)


def detectable_by(test: PairedTest, alpha: float) -> float:
    """Return the smallest difference that a test on as many seeds of this spread detects, or nan without a spread."""
    if not test.spread > 0:
        return nan
    return detectable(test.spread, test.n, alpha=alpha, is_paired=test.method != "Welch", other=test.larger)


def least_shift(df: float) -> float:
    """Return how many standard errors a quantity has to be from 0 for 80 % power of a two-sided t-test at 0.05."""
    return _least_shift(df + 1, df + 1, POWER, 0.05, True)


@lru_cache(maxsize=1024)
def _least_shift(n: float, other: float, target: float, alpha: float, is_paired: bool) -> float:
    critical, share, df = _critical(n, other, alpha, is_paired)
    if not alpha < target < 1:
        raise DataError(f"target is a probability above alpha ({alpha:g}) and below 1, got {target}.")
    most = 10 * critical.max() + 40
    return float(brentq(lambda shift: _power(shift, critical, share, df) - target, 0.0, most, rtol=1e-12))


def seeds_needed(
    difference: float, std: float, alpha: float = 0.05, is_paired: bool = False, limit: int = 1_000_000
) -> int | None:
    """Return the fewest seeds of each arm that show a difference with a probability of `POWER`.

    None for no difference, and beyond the limit.

    Args:
        difference: of the two means.
        std: as of `power`.
        alpha: as of `power`.
        is_paired: as of `power`.
        limit: most seeds.

    Raises:
        DataError: as `power`.
    """
    if not (isfinite(difference) and isfinite(std)) or difference == 0:
        return None
    seeds = range(2, limit + 1)
    place = bisect_left(seeds, True, key=lambda n: power(difference, std, n, alpha, is_paired) >= POWER - ROUNDING)
    return seeds[place] if place < len(seeds) else None
