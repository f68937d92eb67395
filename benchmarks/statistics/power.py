"""How many seeds show a difference: exact, from the noncentral t distribution."""

from collections.abc import Callable
from math import isfinite, isnan, sqrt

from scipy import special, stats


def power(difference: float, std: float, n: int, alpha: float = 0.05, is_paired: bool = False) -> float:
    """Power of the two-sided t-test, from 0 to 1, from the noncentral t distribution. One seed has none.

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
    df, size = 2 * (n - 1), n / 2
    if is_paired:
        df, size = n - 1, n
    shift = abs(difference) / std * sqrt(size)
    critical = float(special.stdtrit(df, 1 - alpha / 2))
    found = 1 - float(special.nctdtr(df, shift, critical))
    if isnan(found):  # from a shift of 37 on
        found = 1 - float(stats.nct.cdf(critical, df, shift))
    if shift < 6:  # beyond, the other tail is below 1e-9, and scipy's distribution begins to answer nan
        found += float(special.nctdtr(df, shift, -critical))
    return found


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
    return fewest(lambda n: power(difference, std, n, alpha, is_paired) >= target, limit)


def fewest(is_enough: Callable[[int], bool], limit: int) -> int | None:
    """Return the smallest n >= 2 that is enough, by doubling and halving. None beyond `limit`."""
    low, high = 1, 2
    while not is_enough(high):
        if high >= limit:
            return None
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def pooled_std(std_a: float, std_b: float) -> float:
    """Root of the mean variance of two arms of equal size: the spread `seeds_needed` wants for two printed cells.

    Args:
        std_a: of the one arm, >= 0.
        std_b: of the other, >= 0.
    """
    return sqrt((std_a**2 + std_b**2) / 2)
