"""A small case computed by kernels and by loops over the whole matrix, before the kernels are trusted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dipole.core.objectives.kernels.fused import fused, sweep_of
from dipole.core.objectives.kernels.launch import FEW, HALF, interpreted, tf32_allowed
from dipole.core.objectives.kernels.source import Summand
from dipole.core.objectives.statistics import Extreme, as_tuple

ROWS, COLUMNS = 20, 36
# Rows are +-STEP in the same odd number of columns: no similarity is 0 or another point at which a slope may jump.
NONZERO, STEP = 15, 0.2426
VALUE, GRADIENT, HALF_GRADIENT = 1e-3, 1e-3, 2e-2

Embeddings = tuple[Tensor, Tensor] | None


def key_of(
    x: Tensor,
    excluded: Tensor,
    summands: Sequence[Summand],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: Embeddings,
    mutual: bool = False,
) -> tuple[object, ...]:
    """What tells one set of compiled kernels from another; numbers such as a temperature are arguments of theirs."""
    kinds = tuple((type(each.statistic), each.running, each.statistic.scale is None) for each in summands)
    device = x.device, _half(embeddings), x.shape[1], _listed(excluded), tf32_allowed(), interpreted()
    return kinds, tuple(extremes), symmetric, mutual, *device


def _half(embeddings: Embeddings) -> torch.dtype | None:
    return embeddings[0].dtype if embeddings is not None and embeddings[0].dtype in HALF else None


def _listed(excluded: Tensor) -> int:
    return min(excluded.shape[1], FEW + 1)


def verdict(
    x: Tensor,
    excluded: Tensor,
    summands: Sequence[Summand],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: Embeddings,
    mutual: bool = False,
) -> str:
    """What is wrong with the kernels that would serve a matrix like this; an empty string if nothing is."""
    try:
        return _compared(x, _listed(excluded), summands, extremes, symmetric, _half(embeddings), mutual)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:300]


def _compared(
    like: Tensor,
    listed: int,
    summands: Sequence[Summand],
    extremes: Sequence[Extreme],
    symmetric: bool,
    half: torch.dtype | None,
    mutual: bool,
) -> str:
    source = torch.Generator().manual_seed(0)
    x = _rows(ROWS, like.shape[1], source)
    y = x if symmetric else _rows(COLUMNS, like.shape[1], source)
    lists = (torch.arange(len(x)).unsqueeze(1) + torch.arange(listed) * (len(y) // 2)) % len(y)  # mutual for two
    lists = lists if listed <= 2 or not symmetric else lists[:, :2].repeat(1, listed)[:, :listed]
    allowed = torch.ones(len(x), len(y), dtype=torch.bool)
    allowed[torch.arange(len(x)).unsqueeze(1), lists] = False
    exact = [each.double().requires_grad_() for each in ([x] if symmetric else [x, y])]
    given = [each.to(like.device).requires_grad_() for each in ([x] if symmetric else [x, y])]
    raw: Embeddings = None
    if half is not None:
        signs = [each.detach().sign().to(half) for each in given]
        raw = signs[0], signs[-1]
    with torch.enable_grad():
        s = exact[0] @ exact[-1].T
        wanted, count = _defined(s, allowed, summands), allowed.sum(1)
        kinds = lists.to(like.device), summands, extremes, symmetric, raw
        if mutual:
            turned = _defined(s.T, allowed.T, summands)
            wanted = [torch.cat(both) for both in zip(wanted, turned, strict=True)]
            count = torch.cat([count, allowed.sum(0)])
            sweep = sweep_of(given[0], given[-1], *kinds, mutual=True)
            total, shifts, where = sweep.sums()
            total.requires_grad_()
        else:
            total, shifts, *where = fused(given[0], given[-1], *kinds)
        sums, shift = total.cpu().double(), shifts.detach().cpu().double()
        found = [
            each.statistic.finish(tuple(sums[each.first : each.stop]), shift[number], count)
            for number, each in enumerate(summands)
        ]
        loss, truth = sums.sum() * 0, s.sum() * 0
        for each, ours, theirs in zip(summands, found, wanted, strict=True):
            if not _close(ours, theirs, VALUE):
                return f"{each.statistic} is off"
            if theirs.requires_grad:
                # Each with a gradient of the same length, so that none hides behind another.
                weights = torch.randn(len(count), generator=source, dtype=torch.float64)
                (length,) = torch.autograd.grad((theirs * weights).sum(), exact[0], retain_graph=True)
                weights /= length.norm().clamp_min(1e-9)
                loss, truth = loss + (ours * weights).sum(), truth + (theirs * weights).sum()
        if summands:
            if mutual:
                (upstream,) = torch.autograd.grad(loss, total)
                dx, dy = sweep.gradients(given[0].detach(), given[-1].detach(), upstream, shifts, True)
                assert dy is not None
                one: tuple[Tensor, ...] = (dx, dy)
            else:
                one = torch.autograd.grad(loss, given)
            other = torch.autograd.grad(truth, exact)
            tolerance = GRADIENT if half is None and not tf32_allowed() else HALF_GRADIENT
            if not all(_close(a.cpu().double(), b, tolerance) for a, b in zip(one, other, strict=True)):
                return "the gradient is off"
    s = s.detach()
    for extreme, index in zip(extremes, where, strict=True):
        sign = 1 if extreme.largest else -1
        seen = torch.where(allowed, sign * s, -torch.inf)
        for values, places in zip((seen, seen.T), index.cpu().split([len(x), len(index) - len(x)]), strict=True):
            if len(places) and not _close(values.gather(1, places.unsqueeze(1)).squeeze(1), values.amax(1), VALUE):
                return f"{extreme} is another one"
    return ""


def _rows(count: int, width: int, source: torch.Generator) -> Tensor:
    used = min(NONZERO, width - (width + 1) % 2)
    signs = torch.randint(0, 2, (count, used), generator=source) * 2.0 - 1
    return torch.nn.functional.pad(signs * STEP, (0, width - used))


def _defined(s: Tensor, allowed: Tensor, summands: Sequence[Summand]) -> list[Tensor]:
    """The statistics of every row, from the whole matrix."""
    found = []
    for each in summands:
        scale = each.statistic.scale
        e, top = None, s.new_zeros(len(s))
        if scale is not None:
            top = torch.where(allowed, scale * s.detach(), -torch.inf).amax(1)
            e = (scale * s - top.unsqueeze(1)).exp()
        parts = as_tuple(each.statistic.parts(s, e))
        sums = tuple(torch.where(allowed, part, 0.0).sum(1) for part in parts)
        found.append(each.statistic.finish(sums, top, allowed.sum(1)))
    return found


def _close(found: Tensor, true: Tensor, tolerance: float) -> bool:
    return bool((found - true).norm() <= tolerance * true.norm().clamp_min(1e-6))
