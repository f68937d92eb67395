"""Compare the kernels with float64 on a small matrix before they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dipole.core.objectives.indices import mask_of
from dipole.core.objectives.kernels.fused import FEW, HALF, fused, interpreted, tf32_allowed
from dipole.core.objectives.statistics import AnyStatistic
from dipole.core.objectives.tiles import MatrixPass

ROWS, COLUMNS = 20, 36
# Every row is +-STEP in the same odd number of columns. So no similarity is 0 or another point where a slope may jump.
NONZERO, STEP = 15, 0.2426
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2


def key_of(problem: MatrixPass) -> tuple[object, ...]:
    """Return the key of a compiled kernel. Numbers such as a temperature are not part of it."""
    kinds = tuple(type(each) for each in problem.statistics), problem.running, problem.extremes, problem.symmetric
    x = problem.x
    return *kinds, x.device, x.shape[1], _half(problem), _listed(problem), tf32_allowed(), interpreted()


def _half(problem: MatrixPass) -> torch.dtype | None:
    if problem.embeddings is not None and problem.embeddings[0].dtype in HALF:
        return problem.embeddings[0].dtype
    return None


def _listed(problem: MatrixPass) -> int:
    return min(problem.excluded.shape[1], FEW + 1)


Reference = Callable[..., dict[AnyStatistic, Tensor]]


def selfcheck_error(problem: MatrixPass, reference: Reference) -> str:
    """Return the error of the kernels for a matrix like this, or an empty string. `reference` is `engine.dense`."""
    try:
        with torch.device("cpu"):  # the numbers are drawn there, whatever PyTorch's default device is
            return _compare(problem, reference)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0][:300]


def _compare(problem: MatrixPass, reference: Reference) -> str:
    source = torch.Generator().manual_seed(0)
    device, half = problem.x.device, _half(problem)
    sizes = (ROWS,) if problem.symmetric else (ROWS, COLUMNS)
    sides = [_rows(size, problem.x.shape[1], source) for size in sizes]
    columns = len(sides[-1])
    # A row excludes itself and the row half a matrix away, which is mutual.
    lists = torch.arange(ROWS).unsqueeze(1) + torch.arange(_listed(problem)) % 2 * (columns // 2)
    lists = lists % columns
    excluded = mask_of(lists, columns)
    counts = (~excluded).sum(1)
    exact = [each.double().requires_grad_() for each in sides]
    given = [each.to(device).requires_grad_() for each in sides]
    raw = None
    if half is not None:
        raw = given[0].detach().sign().to(half), given[-1].detach().sign().to(half)
    small = replace(problem, x=given[0], y=given[-1], excluded=lists.to(device), embeddings=raw)
    with torch.enable_grad():
        found = [each.cpu().double() for each in fused(small)]
        ours = small.finish(found, counts)
        wanted: list[AnyStatistic] = [*problem.statistics, *problem.extremes]
        theirs = reference(exact[0] @ exact[-1].T, excluded, wanted, counts, None)
        loss, truth = found[0].sum() * 0, exact[0].sum() * 0
        for statistic in problem.statistics:
            if not _close(ours[statistic], theirs[statistic], TOLERANCE):
                return f"{statistic} is off"
            if theirs[statistic].requires_grad:
                # Scale each gradient to length 1, so that a large one cannot hide an error in a small one.
                weights = torch.randn(ROWS, generator=source, dtype=torch.float64)
                (gradient,) = torch.autograd.grad((theirs[statistic] * weights).sum(), exact[0], retain_graph=True)
                weights /= gradient.norm().clamp_min(1e-9)
                loss = loss + (ours[statistic] * weights).sum()
                truth = truth + (theirs[statistic] * weights).sum()
        if problem.statistics:
            tolerance = TOLERANCE if half is None and not tf32_allowed() else HALF_TOLERANCE
            gradients = torch.autograd.grad(loss, given), torch.autograd.grad(truth, exact)
            if not all(_close(a.cpu().double(), b, tolerance) for a, b in zip(*gradients, strict=True)):
                return "the gradient is off"
    s = exact[0].detach() @ exact[-1].detach().T
    for extreme in problem.extremes:
        at_ours, at_theirs = (s.gather(1, each[extreme].long().unsqueeze(1)) for each in (ours, theirs))
        if not _close(at_ours, at_theirs, TOLERANCE):
            return f"{extreme} is off"
    return ""


def _rows(count: int, width: int, source: torch.Generator) -> Tensor:
    used = min(NONZERO, width - (width + 1) % 2)
    signs = torch.randint(0, 2, (count, used), generator=source) * 2.0 - 1
    return torch.nn.functional.pad(signs * STEP, (0, width - used))


def _close(found: Tensor, true: Tensor, tolerance: float) -> bool:
    return bool((found - true).norm() <= tolerance * true.norm().clamp_min(1e-6))
