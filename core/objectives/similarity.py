"""Similarities s_ij = x_i . y_j, and row statistics of matrices that are small enough to be formed as a whole."""

from collections.abc import Callable, Sequence
from typing import Literal

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

Similarity = Literal["cosine", "dot", "bilinear"]

_TINY = 1e-12
# Matrices with fewer entries are formed as a whole. On a processor, tiles are 1.2 to 1.5 times as fast at this size,
# 4 MB in float32. On a GPU the whole matrix is twice as fast as kernels for 4,096 rows, and slower for 8,192.
LARGEST = 1 << 20
LARGEST_ON_GPU = (1 << 24) + 1


def full_precision(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 embeddings to float32. Other dtypes stay as they are.

    Args:
        x: (...), of any shape.

    Returns:
        (...), the same tensor if nothing changes.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float()
    return x


def normalize(x: Tensor) -> Tensor:
    """Scale rows to unit length, (n, d). A zero row stays zero and gets a zero gradient."""
    return x * lengths(x).reciprocal()  # a quotient takes longer in the backward pass


def lengths(x: Tensor) -> Tensor:
    """Return the lengths of rows, (n, 1), with infinity for a zero row."""
    return torch.threshold(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _TINY, torch.inf)


class _PairedDot(torch.autograd.Function):
    """Compute x_i . y_p for the listed p in chunks, so that (A, K, d) never exists for large K."""

    CHUNK = 1 << 22  # entries of a gathered chunk

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, index: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, y, index)
        out = x.new_empty(index.shape)
        for rows in _PairedDot.chunks(x, index):
            out[rows] = torch.einsum("ad,akd->ak", x[rows], y[index[rows]])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        x, y, index = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need operations that are not in place
            far = (grad.unsqueeze(2) * x.unsqueeze(1)).flatten(0, 1)
            return (grad.unsqueeze(2) * y[index]).sum(1), torch.zeros_like(y).index_add(0, index.flatten(), far), None
        dx, dy = torch.empty_like(x), torch.zeros_like(y)
        for rows in _PairedDot.chunks(x, index):
            near, g = index[rows], grad[rows]
            dx[rows] = torch.einsum("ak,akd->ad", g, y[near])
            dy.index_add_(0, near.reshape(-1), (g.unsqueeze(2) * x[rows].unsqueeze(1)).flatten(0, 1))
        return dx, dy, None

    @staticmethod
    def chunks(x: Tensor, index: Tensor) -> list[slice]:
        step = max(1, _PairedDot.CHUNK // max(1, index.shape[1] * x.shape[1]))
        return [slice(start, start + step) for start in range(0, len(index), step)]


def paired(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return similarities (A, K) of each anchor with its listed candidates. Padding (-1) is read as candidate 0."""
    values: Tensor = _PairedDot.apply(x, y, index.clamp_min(0))  # type: ignore[no-untyped-call]
    return values


def fits(anchors: int, candidates: int, device: torch.device) -> bool:
    """Return whether a matrix (A, C) is small enough to be formed as a whole on a device."""
    if device.type == "cuda":
        return anchors * candidates < LARGEST_ON_GPU
    return anchors * candidates < LARGEST


def dense(
    x: Tensor,
    y: Tensor,
    positives: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    *,
    counts: Callable[[], Tensor],
    bound: float | None,
    padded: bool,
    full: bool = False,
    first: int = 0,
) -> tuple[Tensor, dict[AnyStatistic, Tensor]]:
    """Compute `engine.similarities` with ordinary PyTorch operations and autograd. `statistics` lists each once."""
    matrix = x @ y.t()
    near = matrix.gather(1, positives.clamp_min(0) if padded else positives)
    if first:
        matrix, excluded = matrix[:, first:], excluded - first
    mask = mask_of(excluded, matrix.shape[1]) if padded or first else None

    def fill_excluded(values: Tensor, fill: float) -> Tensor:  # in place: a new matrix costs as much as its numbers
        if mask is not None:
            return values.masked_fill_(mask, fill)
        return values.scatter_(1, excluded, fill)

    zeroed: Tensor | None = None
    results: dict[AnyStatistic, Tensor] = {}
    for wanted in statistics:
        if isinstance(wanted, Extreme):
            results[wanted] = _place(fill_excluded(wanted.sign * matrix.detach(), -torch.inf), first)
            continue
        statistic = wanted.exact
        e: Tensor | None = None
        shift: Tensor | None = None
        if statistic.scale is not None:
            exponent = fill_excluded(statistic.scale * matrix, -torch.inf)
            if needs_maximum(wanted, bound):
                exponent, shift = _below_top(exponent)
            e = exponent.exp_()
        if isinstance(statistic, LogSumExp):
            assert e is not None
            parts: tuple[Tensor, ...] = (e,)
            if full:  # no sum is 0, so the logarithm needs no mask
                found = e.sum(1).log()
                results[wanted] = found if shift is None else found + shift
                continue
        else:
            # At an excluded entry a part may be infinite, and its gradient 0 * inf. So parts see a similarity of 0.
            zeroed = fill_excluded(matrix.clone(), 0.0) if zeroed is None else zeroed
            parts = as_tuple(statistic.parts(zeroed, e))
            if e is None:
                parts = tuple([fill_excluded(part.clone(), 0.0) for part in parts])
        if shift is None:
            shift = x.new_zeros(())
        results[wanted] = statistic.finish(tuple([part.sum(1) for part in parts]), shift, counts())
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
