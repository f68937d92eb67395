"""Quantiles and tails of the distributions that tests need, numbers or arrays.

scipy's functions themselves: `scipy.stats` calls the same ones, and takes 100 microseconds to check what it is given,
which is most of the time of a report.
"""

from typing import Any

from scipy import special, stats


def t_quantile(p: Any, df: Any) -> Any:
    """t with P(T <= t) = p."""
    return special.stdtrit(df, p)


def t_above(t: Any, df: Any) -> Any:
    """P(T > t), by symmetry. Accurate in the far tail."""
    return special.stdtr(df, -t)


def noncentral_t_below(t: float, df: float, shift: float) -> float:
    """P(T <= t) of the noncentral t distribution."""
    found = float(special.nctdtr(df, shift, t))
    return found if found == found else float(stats.nct.cdf(t, df, shift))  # nan from a shift of 37 on


def f_quantile(p: float, df: float, df_below: float) -> float:
    """f with P(F <= f) = p."""
    return float(special.fdtri(df, df_below, p))


def f_below(f: float, df: float, df_below: float) -> float:
    """P(F <= f)."""
    return float(special.fdtr(df, df_below, f))


def f_above(f: float, df: float, df_below: float) -> float:
    """P(F > f)."""
    return float(special.fdtrc(df, df_below, f))
