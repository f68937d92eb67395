"""The sweep by kernels, as autograd sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dipole.core.objectives.dense import sweep_again
from dipole.core.objectives.kernels.launch import HALF, Factors, Sweep
from dipole.core.objectives.kernels.source import Summand
from dipole.core.objectives.statistics import Extreme


class _Fused(torch.autograd.Function):
    """(sums (N, A), shifts (S, A), indices (A,) ...), as the sweep over tiles gives them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, sweep: Sweep) -> tuple[Tensor, ...]:
        sums, shifts, where = sweep.sums()
        ctx.sweep = sweep
        ctx.save_for_backward(x, y, shifts)
        ctx.mark_non_differentiable(shifts, *where)
        return sums, shifts, *where

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, y, shifts = ctx.saved_tensors
        sweep: Sweep = ctx.sweep
        candidates = ctx.needs_input_grad[1] and not sweep.symmetric
        if torch.is_grad_enabled():
            statistics, lists = [each.statistic for each in sweep.summands], sweep.lists.long()
            found = sweep_again(statistics, x, y, lists, shifts, grad, symmetric=sweep.symmetric, candidates=candidates)
            return *found, None
        return *sweep.gradients(x, y, grad, shifts, candidates), None


def fused(
    x: Tensor,
    y: Tensor,
    excluded: Tensor,
    summands: Sequence[Summand],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: tuple[Tensor, Tensor] | None = None,
    tune: bool = False,
) -> tuple[Tensor, ...]:
    """(sums (N, A), shifts (S, A), indices (A,) ...) of the similarities x y^T, with gradient.

    Args:
        x: (A, d) and
        y: (C, d), in float32.
        excluded: (A, E) columns that take no part in a row; those outside the matrix are ignored.
        summands: the statistics with a sum.
        extremes: the statistics with an index.
        symmetric: x is y, and exclusion is mutual.
        embeddings: of which the rows of x and y are multiples; where they are in half precision their products are
            taken, which are exact, and the factors are multiplied in afterwards.
        tune: choose blocks by measuring.
    """
    sweep = sweep_of(x, y, excluded, summands, extremes, symmetric, embeddings, tune)
    found: tuple[Tensor, ...] = _Fused.apply(x, y, sweep)  # type: ignore[no-untyped-call]
    return found


def sweep_of(
    x: Tensor,
    y: Tensor,
    excluded: Tensor,
    summands: Sequence[Summand],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: tuple[Tensor, Tensor] | None = None,
    tune: bool = False,
    mutual: bool = False,
) -> Sweep:
    """The same as kernels see it, without gradient; `mutual` if the rows of y are served as well."""
    lists = excluded.sort(1).values.to(torch.int32)
    return Sweep(*_factors(x, y, embeddings), lists, symmetric, tuple(summands), tuple(extremes), tune, mutual)


def _factors(x: Tensor, y: Tensor, embeddings: tuple[Tensor, Tensor] | None) -> tuple[Factors, Factors]:
    x, y = x.detach(), y.detach()
    if embeddings is None or any(each.dtype not in HALF for each in embeddings):
        own = Factors(x.contiguous())
        return own, own if x is y else Factors(y.contiguous())
    own = _scaled(x, embeddings[0].detach())
    return own, own if embeddings[1] is embeddings[0] else _scaled(y, embeddings[1].detach())


def _scaled(x: Tensor, raw: Tensor) -> Factors:
    length = torch.linalg.vector_norm(raw, dim=1, dtype=torch.float32)
    scale = torch.linalg.vector_norm(x, dim=1) / torch.where(length > 0, length, torch.inf)
    return Factors(raw.contiguous(), scale)
