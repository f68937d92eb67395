"""Compute row statistics from the whole similarity matrix, with ordinary PyTorch operations and autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dipole.core.objectives.statistics import (
    LOWEST,
    SMALLEST_EXPONENT,
    AnyStatistic,
    Extreme,
    LogSumExp,
    as_tuple,
    needs_maximum,
)

# Matrices with fewer entries are formed as a whole. At this size, 4 MB in float32, tiles are 1.2 to 1.5 times as fast.
LARGEST = 1 << 20


def fits(anchors: int, candidates: int) -> bool:
    """Return whether a matrix (A, C) is small enough to be formed as a whole."""
    return anchors * candidates < LARGEST


def dense(
    x: Tensor,
    y: Tensor,
    positives: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    *,
    counts: Tensor,
    bound: float | None,
    padded: bool,
    full: bool = False,
    first: int = 0,
) -> tuple[Tensor, dict[AnyStatistic, Tensor]]:
    """Return the similarities of the positives, (A, K), and the statistics of the rows of x y^T, (A,) each.

    Args:
        x: (A, d).
        y: (C, d).
        positives: (A, K) columns. Padding (-1) is read as column 0.
        excluded: (A, E) columns that take no part in a row.
        statistics: what to compute, each once.
        counts: (A,) number of columns that take part in each row.
        bound: upper bound of |x_i . y_j|. None if unknown.
        padded: -1 may occur in `positives` and `excluded`, or a column may be listed twice.
        full: every row is known to have a column that takes part.
        first: columns before it take part in no row.
    """
    matrix = x @ y.t()
    near = matrix.gather(1, positives.clamp_min(0) if padded else positives)
    if first:
        matrix, excluded = matrix[:, first:], excluded - first
    mask = mask_of(excluded, matrix.shape[1]) if padded or first else None

    def replace_excluded(values: Tensor, fill: float) -> Tensor:
        if mask is not None:
            return values.masked_fill(mask, fill)
        return values.scatter(1, excluded, fill)

    zeroed: Tensor | None = None
    results: dict[AnyStatistic, Tensor] = {}
    for wanted in statistics:
        if isinstance(wanted, Extreme):
            values = matrix.detach() if wanted.largest else -matrix.detach()
            results[wanted] = _place(replace_excluded(values, -torch.inf), first)
            continue
        statistic = wanted.exact
        e: Tensor | None = None
        shift: Tensor | None = None
        if statistic.scale is not None:
            exponent = statistic.scale * matrix
            if mask is not None:
                exponent.masked_fill_(mask, -torch.inf)
            else:
                exponent.scatter_(1, excluded, -torch.inf)
            if needs_maximum(wanted, bound):
                exponent, shift = _below_top(exponent)
            e = exponent.exp()
        if isinstance(statistic, LogSumExp):
            assert e is not None
            parts: tuple[Tensor, ...] = (e,)
            if full:  # no sum is 0, so the logarithm needs no mask
                found = e.sum(1).log()
                results[wanted] = found if shift is None else found + shift
                continue
        else:
            # At an excluded entry a part may be infinite, and its gradient 0 * inf. So parts see a similarity of 0.
            zeroed = replace_excluded(matrix, 0.0) if zeroed is None else zeroed
            parts = as_tuple(statistic.parts(zeroed, e))
            if e is None:
                parts = tuple([replace_excluded(part, 0.0) for part in parts])
        if shift is None:
            shift = x.new_zeros(())
        results[wanted] = statistic.finish(tuple([part.sum(1) for part in parts]), shift, counts)
    return near, results


def _below_top(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract each row's maximum, (A,), a constant. Exponents of subnormal numbers, which are slow, become -inf."""
    if not exponent.shape[1]:
        return exponent, exponent.new_full((len(exponent),), LOWEST)
    top = exponent.detach().amax(1).clamp_min(LOWEST)
    below = exponent - top.unsqueeze(1)
    return torch.threshold(below, SMALLEST_EXPONENT[below.dtype], -torch.inf), top


def _place(values: Tensor, first: int) -> Tensor:
    """Return the column of each row's largest entry, (A,), or -1 for a row without entries."""
    if not values.shape[1]:
        return torch.full((len(values),), -1, device=values.device)
    top, place = values.max(1)
    return torch.where(top > -torch.inf, place + first, -1)


def mask_of(index: Tensor, width: int) -> Tensor:
    """Return (R, T), True at the listed columns (R, E) of a tile (R, T). Columns outside the tile are ignored."""
    inside = (index >= 0) & (index < width)
    mask = torch.zeros(len(index), width + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, torch.where(inside, index, width), True)[:, :width]  # the last column takes the rest
