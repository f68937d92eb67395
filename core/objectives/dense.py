"""A matrix that fits the cache, formed as a whole: the statistics of its rows and its positives in one step.

Below some hundred rows a step costs what its calls cost, not what its numbers cost; here are as few as can be.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dipole.core.objectives.similarity import lengths, normalize, unnormalized
from dipole.core.objectives.statistics import AnyStatistic, Extreme, Statistic, as_tuple
from dipole.core.objectives.tile import Side, Tile, mask_of
from dipole.core.utils.uncompiled import uncompiled

# Entries of a matrix that is formed as a whole: 4 MB in float32.
LARGEST = 1 << 20
# exp(scale * s) is summed without a maximum while |scale * s| stays below this.
SAFE_EXPONENT = 60.0
# The maximum of a row that has no entry: finite, so that the difference of two is a number.
LOWEST = -1e30


def fits(anchors: int, candidates: int) -> bool:
    """Whether a matrix (A, C) is formed as a whole."""
    return anchors * candidates <= LARGEST


@dataclass(frozen=True)
class _Plan:
    """What is asked of a matrix besides its numbers.

    Args:
        statistics: each with whether the row's maximum is subtracted in its exponent.
        extremes: whose places are wanted.
        padded: -1 may stand among the excluded, or a column twice.
        first: columns before it take part in no row.
        symmetric: x is y, and exclusion is mutual.
        unit: rows are normalised first.
        full: every row has an entry that takes part.
    """

    statistics: tuple[tuple[Statistic, bool], ...]
    extremes: tuple[Extreme, ...]
    padded: bool
    first: int
    symmetric: bool
    unit: bool
    full: bool

    def tile(self, s: Tensor, excluded: Tensor) -> Tile:
        """The matrix (A, C - first) as a tile."""
        rows, columns = slice(0, len(s)), slice(0, s.shape[1])
        sides = (Side(rows, 1),)
        if self.padded or self.first:
            return Tile(rows, columns, s, mask_of(excluded - self.first, s.shape[1]), sides)
        return Tile(rows, columns, s, None, sides, excluded)

    def again(self, tensors: Sequence[Tensor], exps: Sequence[float]) -> Tile:
        """The same tile of what was saved of it: s, what is excluded, and the exponentials of some scales."""
        s, excluded, listed, *formed = tensors
        columns = slice(0, s.shape[1])
        sides = (Side(slice(0, len(s)), 1),)
        return Tile(sides[0].rows, columns, s, excluded, sides, listed, dict(zip(exps, formed, strict=True)))


class _Whole(torch.autograd.Function):
    """Similarities of positives (A, K); then sums of statistics, places of extremes and shifts, (A,) each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, indices: tuple[Tensor, Tensor], plan: _Plan
    ) -> tuple[Tensor, ...]:
        positives, excluded = indices  # in a tuple, which autograd need not look through
        raw = x, y  # y is None where it is x
        y = x if y is None else y
        ones: tuple[Tensor, ...] = ()  # normalised rows and their lengths, of x and where it is another of y
        if plan.unit:
            of_x = lengths(x)
            ones = (x / of_x, of_x)
            if not plan.symmetric:
                of_y = lengths(y)
                ones += y / of_y, of_y
            x, y = ones[0], ones[0 if plan.symmetric else 2]
        matrix = x @ y.t()
        tile = plan.tile(matrix[:, plan.first :] if plan.first else matrix, excluded)
        sums, shifts, shifted = [], [], []
        e: Tensor | None
        for statistic, runs in plan.statistics:
            if runs:
                e, shift = _below_top(statistic, tile)
                shifted.append(e)
                shifts.append(shift)
            else:
                e = _exp(statistic, tile)
            for part in as_tuple(statistic.parts(tile.s, e)):
                sums.append((part if part is e else tile.allowed(part, 0.0)).sum(1))
        ctx.plan, ctx.exps, ctx.saved_ones = plan, tuple(tile.formed), len(ones)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*raw, positives, excluded, *ones, *shifts, *shifted, *tile.tensors())
        places = [_place(each, tile, plan.first) for each in plan.extremes]
        if places or shifts:
            ctx.mark_non_differentiable(*places, *shifts)
        return matrix.gather(1, positives), *sums, *places, *shifts

    @staticmethod
    def backward(ctx: Any, near: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x, y, positives, excluded, *saved = ctx.saved_tensors
        ones, saved = saved[: ctx.saved_ones], saved[ctx.saved_ones :]
        running = sum(runs for _, runs in plan.statistics)
        shifts = iter(saved[:running])
        if torch.is_grad_enabled():
            return *_again(plan, (x, y, positives, excluded), shifts, (near, *grads), ctx.needs_input_grad), *[None] * 2
        shifted = iter(saved[running : 2 * running])
        tile = plan.again(saved[2 * running :], ctx.exps)
        upstream = iter(grads)
        # Where a slope is as symmetric as s, both directions are one product: a third of what adding a transpose costs.
        both = plan.symmetric and not running
        total: Tensor | None = None  # dL/ds, (A, C)
        cleared = plan.full  # multiples of e are 0 already where an entry takes no part, by what is a number then
        for statistic, runs in plan.statistics:
            e = next(shifted) if runs else _exp(statistic, tile)
            slopes, factor = slopes_of(statistic, tile.s, e)
            for slope in slopes:
                weight = next(upstream)
                if weight is not None:
                    weight = (weight if factor == 1 else factor * weight).unsqueeze(1)
                    weight = weight + weight.t() if both else weight
                    cleared = cleared and slope is e
                    total = slope * weight if total is None else total.addcmul_(slope, weight)
        if total is None:
            total = torch.zeros_like(tile.s)
        elif not cleared:
            total = tile.allowed_(total, 0.0)
        if plan.first:
            total = pad(total, (plan.first, 0))
        if near is not None:
            total.scatter_add_(1, positives, near)
            if both:
                total.scatter_add_(0, positives.t(), near.t())
        if plan.unit:
            x, y = ones[0], ones[0 if plan.symmetric else 2]
        elif plan.symmetric:
            y = x
        dx = (total if both or not plan.symmetric else total + total.t()) @ y
        dy = total.t() @ x if ctx.needs_input_grad[1] and not plan.symmetric else None
        if plan.unit:
            dx = unnormalized(dx, x, ones[1])
            dy = None if dy is None else unnormalized(dy, y, ones[3])
        return dx, dy, None, None


def _below_top(statistic: Statistic, tile: Tile) -> tuple[Tensor, Tensor]:
    """e^{scale s - top}, (A, C), 0 where excluded, and the top of each row, (A,); LOWEST where all is excluded."""
    s, scale = tile.s, statistic.scale
    assert scale is not None
    if not s.shape[1]:
        return torch.zeros_like(s), s.new_full((len(s),), LOWEST)
    exponent = tile.allowed(s, -math.inf) if _is_one(scale) else tile.allowed_(scale * s, -math.inf)  # never s itself
    top = exponent.amax(1).clamp_min_(LOWEST)
    return exp_below(exponent.sub_(top.unsqueeze(1))), top


def _exp(statistic: Statistic, tile: Tile) -> Tensor | None:
    """e^{scale s}, (A, C), 0 where excluded; None without a scale."""
    return None if statistic.scale is None else tile.exp(statistic.scale)


def _is_one(scale: float | Tensor) -> bool:
    """Whether to multiply by it is a pass for nothing, as for raw dot products."""
    return isinstance(scale, float) and scale == 1


def exp_below(exponent: Tensor) -> Tensor:
    """e^exponent, written over it, of exponents of at most 0; exactly 0 where it is no normal number.

    A processor takes a hundred times as long over numbers below those, and beside the 1 of a row's maximum they are
    nothing.
    """
    if exponent.device.type != "cpu":
        return exponent.exp_()
    lowest = math.ceil(math.log(torch.finfo(exponent.dtype).tiny))
    # The next number down from 1 is 10^-7 away: a limit of 1.01 e^lowest takes what was raised to it, and little else.
    return torch.threshold_(exponent.clamp_min_(lowest).exp_(), 1.01 * math.exp(lowest), 0.0)


def _place(extreme: Extreme, tile: Tile, first: int) -> Tensor:
    """(A,) column of the largest or smallest entry that takes part; -1 in a row without one."""
    if not tile.s.shape[1]:
        return torch.full((len(tile.s),), -1, device=tile.s.device)
    top, place = tile.allowed(tile.s if extreme.largest else -tile.s, -math.inf).max(1)
    return torch.where(top > -math.inf, place + first, -1)


def sums_again(statistic: Statistic, s: Tensor, mask: Tensor, shift: Tensor | None) -> list[Tensor]:
    """The sums (A,) of a statistic from a matrix (A, C) by functions that can be differentiated any number of times.

    Args:
        statistic: what is summed.
        s: (A, C) similarities, with gradient.
        mask: (A, C) True where an entry takes no part.
        shift: (A,) subtracted in the exponent, a constant; None is 0.
    """
    s = s.masked_fill(mask, 0.0)  # whatever stands there: an infinite part would leave 0 times infinity behind
    e = None
    if statistic.scale is not None:
        exponent = statistic.scale * s if shift is None else statistic.scale * s - shift.unsqueeze(1)
        e = exponent.masked_fill(mask, 0.0).exp()
    return [part.masked_fill(mask, 0.0).sum(1) for part in as_tuple(statistic.parts(s, e))]


def _again(
    plan: _Plan,
    inputs: tuple[Tensor, Tensor | None, Tensor, Tensor],
    shifts: Iterator[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients (A, d), (C, d) as functions that can be differentiated again."""
    x, y, positives, excluded = inputs
    first = normalize(x) if plan.unit else x
    second = first if y is None else normalize(y) if plan.unit else y
    matrix = first @ second.T
    s = matrix[:, plan.first :]
    mask = mask_of(excluded - plan.first, s.shape[1])
    outputs = [matrix.gather(1, positives)]
    for statistic, runs in plan.statistics:
        outputs += sums_again(statistic, s, mask, next(shifts) if runs else None)
    wanted = [x] if y is None else [each for each, need in zip((x, y), needed, strict=False) if need]
    found = gradients(outputs, wanted, grads)
    if y is None:
        return found[0], None
    return found.pop(0) if needed[0] else None, found.pop(0) if needed[1] else None


def sweep_again(
    statistics: Sequence[Statistic],
    x: Tensor,
    y: Tensor,
    excluded: Tensor,
    shifts: Tensor,
    grad: Tensor,
    *,
    symmetric: bool,
    candidates: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients (A, d), (C, d) of a sweep as functions that can be differentiated: the whole matrix once more.

    Args:
        statistics: those with a sum.
        x: (A, d) and
        y: (C, d).
        excluded: (A, E) columns that take no part in a row; those outside the matrix are ignored.
        shifts: (S, A) subtracted in each statistic's exponent, constants.
        grad: (N, A) gradient of the sums.
        symmetric: x is y; the gradient of both is the first.
        candidates: the gradient of y is wanted as well.
    """
    s = x @ (x if symmetric else y).T
    mask = mask_of(excluded, len(y))
    sums = [
        each
        for statistic, shift in zip(statistics, shifts, strict=True)
        for each in sums_again(statistic, s, mask, shift)
    ]
    dx, *dy = gradients(sums, [x, y] if candidates and not symmetric else [x], grad.unbind())
    return dx, dy[0] if dy else None


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """dL/d inputs from dL/d outputs, itself differentiable; outputs that the inputs do not reach add nothing."""
    used = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if grad is not None and out.requires_grad]
    if not used:
        return [torch.zeros_like(each) for each in inputs]
    out, upstream = zip(*used, strict=True)
    return list(torch.autograd.grad(out, inputs, upstream, create_graph=True, materialize_grads=True))


@uncompiled
def whole(
    x: Tensor,
    y: Tensor,
    positives: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    *,
    padded: bool,
    first: int,
    counts: Tensor,
    bound: float | None,
    symmetric: bool,
    unit: bool = False,
    full: bool = False,
) -> tuple[Tensor, dict[AnyStatistic, Tensor]]:
    """Similarities of positives, (A, K), and all statistics of the rows of x y^T, with gradient.

    Args:
        x: (A, d); y: (C, d); the same tensor if `symmetric`.
        positives: (A, K) columns; padding is read as column 0.
        excluded: (A, E) columns that take no part in a row.
        statistics: what is wanted, each once.
        padded: -1 may stand among positives or excluded, or a column twice.
        first: columns before it take part in no row.
        counts: (A,) number of columns that take part in each row.
        bound: largest |x_i . y_j| that can occur; None if unknown.
        symmetric: x is y, and j is excluded for i exactly if i is for j.
        unit: similarities are those of the normalised rows of x and y.
        full: every row is known to have an entry that takes part.
    """
    unbounded = math.inf if bound is None else bound
    sums = [each for each in statistics if isinstance(each, Statistic)]
    extremes = tuple([each for each in statistics if isinstance(each, Extreme)])
    asked = tuple([(each, needs_maximum(each, unbounded)) for each in sums])
    plan = _Plan(asked, extremes, padded, first, symmetric, unit, full)
    near, *found = _Whole.apply(  # type: ignore[no-untyped-call]
        x, None if symmetric else y, (positives.clamp_min(0) if padded else positives, excluded), plan
    )
    rest = iter(found)
    parts = [tuple(islice(rest, len(parts_of(each)))) for each in sums]
    results: dict[AnyStatistic, Tensor] = {each: next(rest) for each in extremes}
    for (statistic, runs), each in zip(asked, parts, strict=True):
        shift = next(rest) if runs else None
        if full:
            results[statistic] = statistic.finish_full(each, shift, counts)
        else:
            results[statistic] = statistic.finish(each, x.new_zeros(()) if shift is None else shift, counts)
    return near, results


def needs_maximum(statistic: Statistic, bound: float) -> bool:
    """Whether a row's maximum is subtracted in its exponent, where similarities lie within the bound."""
    if statistic.learned:
        return statistic.scale is not None
    return statistic.scale is not None and abs(statistic.scale) * bound > SAFE_EXPONENT


def parts_of(statistic: Statistic) -> tuple[bool, ...]:
    """For each of its parts whether that is e itself."""
    return _parts_of(statistic.form)


@lru_cache(maxsize=256)
def _parts_of(statistic: Statistic) -> tuple[bool, ...]:
    s, e = torch.zeros(0, 0), None if statistic.scale is None else torch.zeros(0, 0)
    return tuple(part is e for part in as_tuple(statistic.parts(s, e)))


def slopes_of(statistic: Statistic, s: Tensor, e: Tensor | None) -> tuple[tuple[Tensor, ...], float]:
    """The slope of each part, and what all are to be multiplied by: of e itself it is scale e, and e is there."""
    if statistic.scale is not None and e is not None and all(parts := parts_of(statistic)):
        return (e,) * len(parts), statistic.scale
    return as_tuple(statistic.slopes(s, e)), 1.0
