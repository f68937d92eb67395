"""Tests that are read together: one correction for the whole family."""

from collections.abc import Sequence
from math import isfinite, nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Holm 1979). A missing test is nan, stays nan and is not counted.

    Args:
        p_values: from 0 to 1 each, or nan.

    Returns:
        The adjusted ones, in the same order.
    """
    adjusted = [nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if isfinite(p)), key=lambda i: p_values[i])
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
