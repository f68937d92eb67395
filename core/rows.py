"""Row statistics: every objective in one tiled sweep over the similarity matrix.

A statistic of row i is a function of sums over its negatives, `sum_j f(s_ij)`. The sweep visits the matrix tile by
tile, adds up the sums of all statistics of all terms, and throws the tile away; the backward pass forms the tile
again, builds `dL/ds` for all statistics at once, and multiplies it into the embeddings. Memory is O((A + C) d + tile).
Where anchors are the candidates and exclusion is mutual, a tile (I, J) serves the rows of I and, transposed, the rows
of J, so only the upper triangle is formed. A matrix whose tiles fit CACHE_BYTES is kept instead of formed again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 512
CACHE_BYTES = 32 << 20
# Similarity that stands for an excluded entry: far below any real one, yet finite, so that 0 * value stays 0.
EXCLUDED = -1e15
# exp(scale * s) is summed without a running maximum while |scale * s| stays below this.
SAFE_EXPONENT = 60.0


class Tile:
    """One block of the similarity matrix, (R, T), with its exponentials formed once for all statistics."""

    def __init__(self, s: Tensor) -> None:
        self.s = s
        self._exp: dict[float, Tensor] = {}

    def exponent(self, scale: float) -> Tensor:
        """scale * s, (R, T), far below zero at excluded entries for either sign of the scale."""
        if scale < 0:
            return torch.where(self.s > EXCLUDED / 2, self.s, -EXCLUDED).mul_(scale)
        return self.s * scale

    def exp(self, scale: float, shift: Tensor | None = None) -> Tensor:
        """e^{scale * s - shift}, (R, T); the unshifted one is kept for the next statistic that asks."""
        if shift is not None:
            return self.exponent(scale).sub_(shift).exp_()
        if scale not in self._exp:
            self._exp[scale] = self.exponent(scale).exp_()
        return self._exp[scale]


class Statistic:
    """What an objective needs of each row. A new one defines the methods below and works for every objective.

    `parts(s, e)` gives the summands f(s) as (R, T) tensors, `slopes(s, e)` their derivatives; `e` is
    e^{scale * s - shift} where the class has a `scale`, else None. Both must vanish at s = EXCLUDED.
    `finish(sums, shift, count)` turns the sums (A,) into the statistic; autograd differentiates it.
    """

    scale: ClassVar[float | None] = None

    def parts(self, s: Tensor, e: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def slopes(self, s: Tensor, e: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class LogSumExp(Statistic):
    """log sum_j e^{scale s_ij}; -inf for a row without negatives."""

    scale: float  # type: ignore[misc]

    def parts(self, s, e):  # type: ignore[no-untyped-def]
        return (e,)

    def slopes(self, s, e):  # type: ignore[no-untyped-def]
        return (e * self.scale,)

    def finish(self, sums, shift, count):  # type: ignore[no-untyped-def]
        some = count > 0
        return torch.where(some, torch.where(some, sums[0], 1.0).log() + shift, -math.inf)


@dataclass(frozen=True)
class SoftmaxMean(Statistic):
    """sum_j s_ij e^{scale s_ij} / sum_j e^{scale s_ij}; 0 for a row without negatives."""

    scale: float  # type: ignore[misc]

    def parts(self, s, e):  # type: ignore[no-untyped-def]
        return e, s * e

    def slopes(self, s, e):  # type: ignore[no-untyped-def]
        return e * self.scale, (s * self.scale).add_(1.0).mul_(e)

    def finish(self, sums, shift, count):  # type: ignore[no-untyped-def]
        some = count > 0
        return torch.where(some, sums[1] / torch.where(some, sums[0], 1.0), 0.0)


@dataclass(frozen=True)
class Sum(Statistic):
    """sum_j s_ij."""

    def parts(self, s, e):  # type: ignore[no-untyped-def]
        return (torch.where(s > EXCLUDED / 2, s, 0.0),)

    def slopes(self, s, e):  # type: ignore[no-untyped-def]
        return ((s > EXCLUDED / 2).to(s.dtype),)

    def finish(self, sums, shift, count):  # type: ignore[no-untyped-def]
        return sums[0]


@dataclass(frozen=True)
class Between(Statistic):
    """sum_j max((high - s_ij)(s_ij - low), 0): how far inside an interval the similarities lie."""

    low: float
    high: float

    def parts(self, s, e):  # type: ignore[no-untyped-def]
        inside = s.clamp(self.low, self.high)
        return ((self.high - inside).mul_(inside.sub_(self.low)),)

    def slopes(self, s, e):  # type: ignore[no-untyped-def]
        # The clamp's ends map to +-(high - low); hardshrink-like masking is one comparison cheaper as a product.
        inside = (s > self.low) & (s < self.high)
        return ((self.low + self.high - 2 * s).mul_(inside),)

    def finish(self, sums, shift, count):  # type: ignore[no-untyped-def]
        return sums[0]


@dataclass(frozen=True)
class Count(Statistic):
    """Number of negatives with low < s_ij < high; without gradient."""

    low: float
    high: float

    def parts(self, s, e):  # type: ignore[no-untyped-def]
        return (((s > self.low) & (s < self.high)).to(s.dtype),)

    def slopes(self, s, e):  # type: ignore[no-untyped-def]
        return (torch.zeros_like(s),)

    def finish(self, sums, shift, count):  # type: ignore[no-untyped-def]
        return sums[0].detach()


@dataclass(frozen=True)
class Extreme:
    """Index of the negative with the largest (or smallest) similarity, (A,); -1 for a row without negatives.

    An index has no gradient: gather the similarity itself with `paired`, as the positives are.
    """

    largest: bool = True


AnyStatistic = Statistic | Extreme


@dataclass(frozen=True)
class Sweep:
    """The matrix to be swept: shapes, exclusions and how its tiles are laid out."""

    excluded: Tensor  # (A, E)
    symmetric: bool
    tile: int

    def tiles(self, x: Tensor, y: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (rows, columns, similarities (R, T)) with excluded entries set to EXCLUDED."""
        for top in range(0, len(x), self.tile):
            rows = slice(top, min(top + self.tile, len(x)))
            listed = self.excluded[rows]
            for left in range(top if self.symmetric else 0, len(y), self.tile):
                columns = slice(left, min(left + self.tile, len(y)))
                s = x[rows] @ y[columns].T
                if listed.shape[1]:
                    index = listed - left
                    here = (index >= 0) & (index < s.shape[1])
                    # Out-of-tile entries write +inf with amin, which changes nothing: no index is read back.
                    s.scatter_reduce_(
                        1,
                        index.clamp(0, s.shape[1] - 1),
                        torch.where(here, EXCLUDED, math.inf).to(s.dtype),
                        "amin",
                    )
                yield rows, columns, s


class _RowSums(torch.autograd.Function):
    """(sums (N, A), shifts (N, A)) of N summands; the shifts are constants of the caller's formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, sweep: Sweep, plan: "_Plan") -> tuple[Tensor, ...]:
        sums, shifts = plan.zeros(x), plan.start_shifts(x)
        best = [x.new_full((len(x),), -math.inf) for _ in plan.extremes]
        where = [torch.full((len(x),), -1, device=x.device) for _ in plan.extremes]
        kept: list[tuple[slice, slice, Tile]] | None = [] if plan.fits(x, y, sweep.symmetric) else None
        for rows, columns, s in sweep.tiles(x, y):
            tile = Tile(s)
            plan.add(tile, rows, sums, shifts, across=False)
            plan.add_extremes(s, rows, columns.start, best, where)
            if sweep.symmetric and rows != columns:
                plan.add(tile, columns, sums, shifts, across=True)
                plan.add_extremes(s.T, columns, rows.start, best, where)
            if kept is not None:
                kept.append((rows, columns, tile))
        ctx.sweep, ctx.plan, ctx.kept = sweep, plan, kept
        ctx.save_for_backward(x, y, shifts)
        ctx.mark_non_differentiable(shifts, *where)
        return sums, shifts, *where

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, y, shifts = ctx.saved_tensors
        dx = torch.zeros_like(x)
        dy = dx if ctx.sweep.symmetric else torch.zeros_like(y) if ctx.needs_input_grad[1] else None
        visits = ctx.kept if ctx.kept is not None else ctx.sweep.tiles(x, y)
        for rows, columns, tile in visits:
            tile = tile if isinstance(tile, Tile) else Tile(tile)
            both = ctx.sweep.symmetric and rows != columns
            slope = ctx.plan.slope(tile, rows, columns if both else None, grad, shifts)
            dx[rows].addmm_(slope, y[columns])
            if dy is not None:
                dy[columns].addmm_(slope.T, x[rows])
        # A diagonal tile of the symmetric case holds both (i, j) and (j, i), hence both products above as well.
        return (dx, None if ctx.sweep.symmetric else dy, None, None)


class _Plan:
    """Which summands are formed, and which of them need a running maximum."""

    def __init__(self, statistics: Sequence[AnyStatistic], bound: float) -> None:
        self.statistics = [stat for stat in statistics if isinstance(stat, Statistic)]
        self.extremes = [stat for stat in statistics if isinstance(stat, Extreme)]
        self.running = [s.scale is not None and abs(s.scale) * bound > SAFE_EXPONENT for s in self.statistics]
        probe = torch.zeros(1, 1)
        self.widths = [len(stat.parts(probe, probe)) for stat in self.statistics]
        ends = [sum(self.widths[: n + 1]) for n in range(len(self.widths))]
        self.slots = [range(end - width, end) for end, width in zip(ends, self.widths, strict=True)]

    def fits(self, x: Tensor, y: Tensor, symmetric: bool) -> bool:
        """Whether all tiles and their exponentials may be kept for the backward pass."""
        kinds = 1 + len({s.scale for s, running in zip(self.statistics, self.running, strict=True) if not running})
        return kinds * len(x) * len(y) * x.element_size() // (2 if symmetric else 1) <= CACHE_BYTES

    def span(self, number: int) -> slice:
        return slice(self.slots[number].start, self.slots[number].stop)

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(sum(self.widths), len(x))

    def start_shifts(self, x: Tensor) -> Tensor:
        shifts = x.new_zeros(len(self.statistics), len(x))
        for number, running in enumerate(self.running):
            if running:
                shifts[number] = -math.inf
        return shifts

    def add(self, tile: Tile, rows: slice, sums: Tensor, shifts: Tensor, across: bool) -> None:
        """Add a tile's summands to its rows; `across`: to the rows that are the tile's columns."""
        along = 0 if across else 1
        for number, stat in enumerate(self.statistics):
            e = None
            if stat.scale is not None:
                if self.running[number]:
                    exponent = tile.exponent(stat.scale)
                    old = shifts[number, rows]
                    new = torch.maximum(old, exponent.amax(along))
                    sums[self.span(number), rows] *= (old - new).exp()
                    shifts[number, rows] = new
                    e = exponent.sub_(new.unsqueeze(along)).exp_()
                else:
                    e = tile.exp(stat.scale)
            for slot, part in zip(self.slots[number], stat.parts(tile.s, e), strict=True):
                sums[slot, rows] += part.sum(along)

    def add_extremes(self, s: Tensor, rows: slice, first: int, best: list[Tensor], where: list[Tensor]) -> None:
        for stat, values, index in zip(self.extremes, best, where, strict=True):
            signed = s if stat.largest else torch.where(s > EXCLUDED / 2, -s, EXCLUDED)
            top, place = signed.max(1)
            better = (top > values[rows]) & (top > EXCLUDED / 2)
            values[rows] = torch.where(better, top, values[rows])
            index[rows] = torch.where(better, place + first, index[rows])

    def slope(self, tile: Tile, rows: slice, across: slice | None, grad: Tensor, shifts: Tensor) -> Tensor:
        """dL/ds of a tile, (R, T), over all statistics and, where it serves both sides, both directions."""
        total: Tensor | None = None
        for number, stat in enumerate(self.statistics):
            shared = stat.scale is None or not self.running[number]
            sides = [(rows, 1)] if across is None else [(rows, 1), (across, 0)]
            upstream = [grad[self.span(number), side].unsqueeze(along + 1) for side, along in sides]
            if shared:
                e = None if stat.scale is None else tile.exp(stat.scale)
                weights = upstream[0] + upstream[1] if across is not None else upstream[0]
                total = _accumulate(total, stat.slopes(tile.s, e), weights)
            elif stat.scale is not None:
                for (side, along), weights in zip(sides, upstream, strict=True):
                    e = tile.exp(stat.scale, shifts[number, side].unsqueeze(along))
                    total = _accumulate(total, stat.slopes(tile.s, e), weights)
        assert total is not None
        return total


def _accumulate(total: Tensor | None, slopes: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    for slope, weight in zip(slopes, weights, strict=True):
        total = slope.mul_(weight) if total is None else total.addcmul_(slope, weight)
    assert total is not None
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def row_statistics(
    x: Tensor,
    y: Tensor,
    excluded: Tensor,
    statistics: Sequence[AnyStatistic],
    *,
    counts: Tensor,
    bound: float | None = None,
    symmetric: bool = False,
    tile: int | None = None,
) -> dict[AnyStatistic, Tensor]:
    """Compute all statistics of the rows of x y^T in one sweep, forward and backward.

    Args:
        x: (A, d); y: (C, d); the same tensor if `symmetric`.
        excluded: (A, E) columns that do not take part in a row; -1 pads.
        statistics: what is wanted; equal ones are computed once.
        counts: (A,) number of columns that take part in each row.
        bound: largest |x_i . y_j| that can occur; None if unknown.
        symmetric: x is y and j is excluded for i exactly if i is for j.
        tile: rows and columns of a tile; by default TILE on a CPU and eight times that on an accelerator.

    Returns:
        A tensor (A,) for each statistic; indices for `Extreme`.
    """
    wanted = list(dict.fromkeys(statistics))
    if bound is None:
        bound = math.inf if x.is_cuda else float(_longest(x) * _longest(y))
    side = tile or (TILE if x.device.type == "cpu" else 8 * TILE)
    plan = _Plan(wanted, bound)
    sweep = Sweep(excluded, symmetric, side)
    with torch.autocast(x.device.type, enabled=False):
        sums, shifts, *where = _RowSums.apply(x, y, sweep, plan)  # type: ignore[no-untyped-call]
    results: dict[AnyStatistic, Tensor] = dict(zip(plan.extremes, where, strict=True))
    for number, stat in enumerate(plan.statistics):
        results[stat] = stat.finish(tuple(sums[plan.span(number)]), shifts[number], counts)
    return results


def _longest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), dim=1).max()
