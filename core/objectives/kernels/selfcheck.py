"""Compare the kernels with float64 on a small matrix before they are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dipole.core.objectives.kernels.fused import FEW, HALF, fused, interpreted, tf32_allowed
from dipole.core.objectives.statistics import Extreme, Statistic, as_tuple, part_count

ROWS, COLUMNS = 20, 36
# Every row is +-STEP in the same odd number of columns. So no similarity is 0 or another point where a slope may jump.
NONZERO, STEP = 15, 0.2426
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2

Embeddings = tuple[Tensor, Tensor] | None


def key_of(
    x: Tensor,
    excluded: Tensor,
    statistics: Sequence[Statistic],
    running: Sequence[bool],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: Embeddings,
) -> tuple[object, ...]:
    """Return the key of a compiled kernel. Numbers such as a temperature are not part of it."""
    kinds = tuple(type(each) for each in statistics), tuple(running), tuple(extremes), symmetric
    return *kinds, x.device, x.shape[1], _half(embeddings), _listed(excluded), tf32_allowed(), interpreted()


def _half(embeddings: Embeddings) -> torch.dtype | None:
    if embeddings is not None and embeddings[0].dtype in HALF:
        return embeddings[0].dtype
    return None


def _listed(excluded: Tensor) -> int:
    return min(excluded.shape[1], FEW + 1)


def verdict(
    x: Tensor,
    excluded: Tensor,
    statistics: Sequence[Statistic],
    running: Sequence[bool],
    extremes: Sequence[Extreme],
    symmetric: bool,
    embeddings: Embeddings,
) -> str:
    """Return the error of the kernels for a matrix like this, or an empty string. Arguments as in `fused`."""
    try:
        return _compare(x, _listed(excluded), statistics, running, extremes, symmetric, _half(embeddings))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:300]


def _compare(
    like: Tensor,
    listed: int,
    statistics: Sequence[Statistic],
    running: Sequence[bool],
    extremes: Sequence[Extreme],
    symmetric: bool,
    half: torch.dtype | None,
) -> str:
    source = torch.Generator().manual_seed(0)
    sides = [_rows(ROWS, like.shape[1], source)]
    if not symmetric:
        sides.append(_rows(COLUMNS, like.shape[1], source))
    columns = len(sides[-1])
    # A row excludes itself and the row half a matrix away, which is mutual.
    lists = (torch.arange(ROWS).unsqueeze(1) + torch.arange(listed) % 2 * (columns // 2)) % columns
    allowed = torch.ones(ROWS, columns, dtype=torch.bool).scatter(1, lists, False)
    exact = [each.double().requires_grad_() for each in sides]
    given = [each.to(like.device).requires_grad_() for each in sides]
    raw = None
    if half is not None:
        raw = given[0].detach().sign().to(half), given[-1].detach().sign().to(half)
    with torch.enable_grad():
        s = exact[0] @ exact[-1].T
        counts = allowed.sum(1)
        sums, shifts, *where = fused(
            given[0], given[-1], lists.to(like.device), statistics, running, extremes, symmetric, raw
        )
        sums, shifts = sums.cpu().double(), shifts.cpu().double()
        loss, truth = sums.sum() * 0, s.sum() * 0
        first = 0
        for number, statistic in enumerate(statistics):
            last = first + part_count(statistic)
            ours = statistic.finish(tuple(sums[first:last]), shifts[number], counts)
            first = last
            theirs = _reference(s, allowed, statistic)
            if not _close(ours, theirs, TOLERANCE):
                return f"{statistic} is off"
            if theirs.requires_grad:
                # Scale each gradient to length 1, so that a large one cannot hide an error in a small one.
                weights = torch.randn(ROWS, generator=source, dtype=torch.float64)
                (gradient,) = torch.autograd.grad((theirs * weights).sum(), exact[0], retain_graph=True)
                weights /= gradient.norm().clamp_min(1e-9)
                loss, truth = loss + (ours * weights).sum(), truth + (theirs * weights).sum()
        if statistics:
            tolerance = TOLERANCE if half is None and not tf32_allowed() else HALF_TOLERANCE
            found, wanted = torch.autograd.grad(loss, given), torch.autograd.grad(truth, exact)
            if not all(_close(a.cpu().double(), b, tolerance) for a, b in zip(found, wanted, strict=True)):
                return "the gradient is off"
    for extreme, index in zip(extremes, where, strict=True):
        sign = 1 if extreme.largest else -1
        seen = torch.where(allowed, sign * s.detach(), -torch.inf)
        if not _close(seen.gather(1, index.cpu().unsqueeze(1)).squeeze(1), seen.amax(1), TOLERANCE):
            return f"{extreme} is off"
    return ""


def _rows(count: int, width: int, source: torch.Generator) -> Tensor:
    used = min(NONZERO, width - (width + 1) % 2)
    signs = torch.randint(0, 2, (count, used), generator=source) * 2.0 - 1
    return torch.nn.functional.pad(signs * STEP, (0, width - used))


def _reference(s: Tensor, allowed: Tensor, statistic: Statistic) -> Tensor:
    """Return the statistic of every row from the whole matrix."""
    e, top = None, s.new_zeros(len(s))
    if statistic.scale is not None:
        exponent = statistic.scale * s
        top = torch.where(allowed, exponent.detach(), -torch.inf).amax(1)
        e = (exponent - top.unsqueeze(1)).exp()
    parts = as_tuple(statistic.parts(s, e))
    sums = tuple(torch.where(allowed, part, 0.0).sum(1) for part in parts)
    return statistic.finish(sums, top, allowed.sum(1))


def _close(found: Tensor, true: Tensor, tolerance: float) -> bool:
    return bool((found - true).norm() <= tolerance * true.norm().clamp_min(1e-6))
