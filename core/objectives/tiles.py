"""Compute row statistics tile by tile, in memory that is linear in the rows.

The forward pass adds up the parts of all statistics tile by tile and discards the tile. The backward pass forms it
again, adds up `dL/ds` of all statistics, and multiplies it into the embeddings. A matrix whose tiles fit into
CACHE_BYTES is kept instead of formed again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from dipole.core.objectives.indices import mask_of
from dipole.core.objectives.similarity import Factors
from dipole.core.objectives.statistics import (
    LOWEST,
    SECOND_DERIVATIVES,
    SMALLEST_EXPONENT,
    AnyStatistic,
    Extreme,
    LogSumExp,
    Statistic,
    as_tuple,
    finished,
    needs_maximum,
    part_count,
)
from dipole.core.utils.errors import EngineError

TILE = 512
CACHE_BYTES = 32 << 20


@dataclass(frozen=True)
class MatrixPass:
    """A similarity matrix (A, C) and the statistics to compute of its rows."""

    factors: Factors
    excluded: Tensor  # (A, E) columns that take no part in a row. Columns outside the matrix are ignored
    symmetric: bool  # x is y, and j is excluded for i exactly if i is for j
    statistics: tuple[Statistic, ...]  # the statistics with a sum
    running: tuple[bool, ...]  # for each, whether its exponent needs a running maximum
    extremes: tuple[Extreme, ...]  # the statistics with an index

    def with_statistics(self, wanted: Sequence[AnyStatistic], bound: float) -> "MatrixPass":
        """Return the same matrix with these statistics, where |x_i . y_j| is at most `bound`."""
        sums = tuple(each for each in wanted if isinstance(each, Statistic))
        extremes = tuple(each for each in wanted if isinstance(each, Extreme))
        running = tuple(needs_maximum(each, bound) for each in sums)
        return replace(self, statistics=sums, running=running, extremes=extremes)

    def finish(self, found: Sequence[Tensor], counts: Tensor) -> dict[AnyStatistic, Tensor]:
        """Return the statistics from (sums (N, A), shifts (S, A), indices (A,) ...) and numbers of columns, (A,)."""
        sums, shifts, *where = found
        results: dict[AnyStatistic, Tensor] = dict(zip(self.extremes, where, strict=True))
        for statistic, slots, shift in zip(self.statistics, self.slots, shifts, strict=True):
            results[statistic] = finished(statistic, tuple(sums[slots]), shift, counts)
        return results

    @property
    def slots(self) -> list[slice]:
        """The rows of the sums, (N, A), of each statistic."""
        stops = accumulate(map(part_count, self.statistics), initial=0)
        return [slice(start, stop) for start, stop in pairwise(stops)]


class RowSums(torch.autograd.Function):
    """(sums (N, A), shifts (S, A), indices (A,) ...) by a `Tiling` or the kernels' `Launcher`.

    The shifts are constants of the caller's formula.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, way: Any) -> tuple[Tensor, ...]:
        sums, shifts, where = way.sums()
        ctx.way = way
        ctx.save_for_backward(x, y, shifts)
        ctx.mark_non_differentiable(shifts, *where)
        return sums, shifts, *where

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise EngineError(SECOND_DERIVATIVES)
        x, y, shifts = ctx.saved_tensors
        candidates = ctx.needs_input_grad[1] and not ctx.way.problem.symmetric
        return *ctx.way.gradients(x, y, grad, shifts, candidates), None


def row_sums(way: Any) -> tuple[Tensor, ...]:
    """Return (sums (N, A), shifts (S, A), indices (A,) ...), with gradient, by a `Tiling` or a `Launcher`."""
    found: tuple[Tensor, ...] = RowSums.apply(way.problem.factors.x, way.problem.factors.y, way)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Side:
    """Rows that a tile adds to, and the axis of the tile along which their entries lie."""

    rows: slice
    axis: int


@dataclass(frozen=True)
class _Tile:
    """One block of the similarity matrix."""

    rows: slice
    columns: slice
    s: Tensor  # (R, T)
    excluded: Tensor | None  # (R, T) True at excluded entries, or None if there are none
    sides: tuple[_Side, ...]
    exponentials: dict[float, Tensor] = field(default_factory=dict)

    def exp(self, scale: float) -> Tensor:
        """Return e^{scale s}, (R, T), 0 where excluded. It is formed once for all statistics and both passes."""
        if scale not in self.exponentials:
            self.exponentials[scale] = self.replace_excluded_(torch.mul(self.s, scale).exp_(), 0.0)
        return self.exponentials[scale]

    def replace_excluded_(self, values: Tensor, fill: float) -> Tensor:
        """Write a number into the excluded entries of values (R, T)."""
        if self.excluded is None:
            return values
        return values.masked_fill_(self.excluded, fill)


@dataclass(frozen=True)
class _Summand:
    """A statistic, its number, its rows of the sums, and whether it needs a running maximum."""

    statistic: Statistic
    number: int
    slots: slice
    running: bool

    def groups(self, tile: _Tile) -> Sequence[tuple[_Side, ...]]:
        """Return the sides that share an exponential: all, unless each row subtracts its own maximum."""
        if self.running:
            return [(side,) for side in tile.sides]
        return [tile.sides]

    def exp(self, tile: _Tile, side: _Side, shifts: Tensor) -> Tensor | None:
        """Return e^{scale s - shift}, (R, T), 0 where excluded. None without a scale."""
        scale = self.statistic.scale
        if scale is None:
            return None
        if not self.running:
            return tile.exp(scale)
        shifted = (scale * tile.s).sub_(shifts[self.number, side.rows].unsqueeze(side.axis))
        return tile.replace_excluded_(exp_below(shifted), 0.0)

    def add(self, tile: _Tile, sums: Tensor, shifts: Tensor) -> None:
        """Add the parts of a tile to the sums (N, A)."""
        for sides in self.groups(tile):
            side, scale = sides[0], self.statistic.scale
            if self.running and scale is not None:
                exponent = tile.replace_excluded_(scale * tile.s, -math.inf)
                old = shifts[self.number, side.rows]
                new = torch.maximum(old, exponent.amax(side.axis))
                sums[self.slots, side.rows] *= (old - new).exp()
                shifts[self.number, side.rows] = new
                e: Tensor | None = exp_below(exponent.sub_(new.unsqueeze(side.axis)))
            else:
                e = self.exp(tile, side, shifts)
            for total, part in zip(sums[self.slots], as_tuple(self.statistic.parts(tile.s, e)), strict=True):
                if part is not e and tile.excluded is not None:
                    part = part.masked_fill(tile.excluded, 0.0)
                for side in sides:
                    total[side.rows] += part.sum(side.axis)

    def slopes(self, tile: _Tile, grad: Tensor, shifts: Tensor, mirrored: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield slopes (R, T) and their weights, (R, 1), (1, T) or (R, T). `grad` (N, A) is that of the sums.

        `mirrored` adds the transpose of a diagonal tile. Without running maxima its slopes are as symmetric as s.
        """
        for sides in self.groups(tile):
            e = self.exp(tile, sides[0], shifts)
            slopes: tuple[Tensor, ...]
            factor = 1.0
            if isinstance(self.statistic, LogSumExp):  # the slope is scale * e: multiply the weights instead
                assert e is not None
                slopes, factor = (e,), self.statistic.scale
            else:
                slopes = as_tuple(self.statistic.slopes(tile.s, e))
            for upstream, slope in zip(grad[self.slots], slopes, strict=True):
                weights = [factor * upstream[side.rows].unsqueeze(side.axis) for side in sides]
                if mirrored:
                    weights.append(weights[0].T)
                yield slope, weights[0] if len(weights) == 1 else weights[0] + weights[1]


class Tiling:
    """Computes one problem tile by tile."""

    def __init__(self, problem: MatrixPass) -> None:
        numbers = range(len(problem.statistics))
        self.problem = problem
        self.side = TILE if problem.factors.x.device.type == "cpu" else 8 * TILE
        self.terms = list(map(_Summand, problem.statistics, numbers, problem.slots, problem.running))
        self.kept: list[_Tile] = []

    def tiles(self, x: Tensor, y: Tensor) -> Iterator[_Tile]:
        """Yield the tiles of x y^T, row by row. A tile (I, J) of a symmetric matrix serves the rows of I and of J."""
        problem, side = self.problem, self.side
        on_cpu = x.device.type == "cpu"
        for top in range(0, len(x), side):
            rows = slice(top, min(top + side, len(x)))
            excluded = problem.excluded[rows]
            # Form masks only where needed: 13 % of a step at B = 4096 on a CPU. An accelerator would have to wait.
            touched = set(excluded.div(side, rounding_mode="floor").unique().tolist()) if on_cpu else None
            for left in range(top if problem.symmetric else 0, len(y), side):
                columns = slice(left, min(left + side, len(y)))
                s = x[rows] @ y[columns].T
                mask = None
                if touched is None or left // side in touched:
                    mask = mask_of(excluded - left, s.shape[1])
                sides: tuple[_Side, ...] = (_Side(rows, 1),)
                if problem.symmetric and left > top:
                    sides = (_Side(rows, 1), _Side(columns, 0))
                yield _Tile(rows, columns, s, mask, sides)

    def sums(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the sums (N, A), the shifts (S, A) and the indices (A,)."""
        problem, terms, x, y = self.problem, self.terms, self.problem.factors.x, self.problem.factors.y
        sums = x.new_zeros(terms[-1].slots.stop if terms else 0, len(x))
        shifts = x.new_zeros(len(terms), len(x))
        for term in terms:
            if term.running:
                shifts[term.number] = LOWEST
        best = [x.new_full((len(x),), -math.inf) for _ in problem.extremes]
        where = [torch.full((len(x),), -1, device=x.device) for _ in problem.extremes]
        kinds = 1 + len({t.statistic.scale for t in terms if t.statistic.scale is not None and not t.running})
        size = kinds * len(x) * len(y) * x.element_size() // (2 if problem.symmetric else 1)
        for tile in self.tiles(x, y):
            for term in terms:
                term.add(tile, sums, shifts)
            for extreme, value, index in zip(problem.extremes, best, where, strict=True):
                _add_extreme(extreme, tile, value, index)
            if size <= CACHE_BYTES:
                self.kept.append(tile)
        return sums, shifts, where

    def gradients(
        self, x: Tensor, y: Tensor, grad: Tensor, shifts: Tensor, candidates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient (A, d) of x and, if `candidates`, the one (C, d) of y, from that of the sums (N, A)."""
        # Kept tiles are released here. A second pass through the same graph forms them again.
        kept, self.kept = self.kept, []
        symmetric = self.problem.symmetric
        dx, dy = torch.zeros_like(x), torch.zeros_like(y) if candidates else None
        running = any(term.running for term in self.terms)
        for tile in kept or self.tiles(x, y):
            # On the diagonal of a symmetric matrix one product serves (i, j) and (j, i).
            diagonal = symmetric and len(tile.sides) == 1
            total = _slope_of(tile, self.terms, grad, shifts, diagonal and not running)
            if diagonal:
                dx[tile.rows].addmm_(total + total.T if running else total, x[tile.rows])
                continue
            dx[tile.rows].addmm_(total, y[tile.columns])
            other = dx if symmetric else dy
            if other is not None:
                other[tile.columns].addmm_(total.T, x[tile.rows])
        return dx, dy


def _slope_of(tile: _Tile, terms: Sequence[_Summand], grad: Tensor, shifts: Tensor, mirrored: bool) -> Tensor:
    """Return dL/ds of a tile, (R, T), 0 where excluded, from the gradient (N, A) of the sums."""
    total: Tensor | None = None
    for term in terms:
        for slope, weight in term.slopes(tile, grad, shifts, mirrored):
            total = slope * weight if total is None else total.addcmul_(slope, weight)
    assert total is not None  # without a sum there is no gradient
    return tile.replace_excluded_(total, 0.0)


def _add_extreme(extreme: Extreme, tile: _Tile, best: Tensor, where: Tensor) -> None:
    """Update the best value (A,) and its column (A,) of the rows that a tile serves."""
    values = tile.replace_excluded_(extreme.sign * tile.s, -math.inf)
    for side in tile.sides:
        top, place = values.max(side.axis)
        first = (tile.columns if side.axis else tile.rows).start
        better = top > best[side.rows]
        best[side.rows] = torch.where(better, top, best[side.rows])
        where[side.rows] = torch.where(better, place + first, where[side.rows])


def exp_below(exponent: Tensor) -> Tensor:
    """Write e^exponent over an exponent of at most 0. Subnormal results become 0: they are slow on a CPU."""
    if exponent.device.type != "cpu":
        return exponent.exp_()
    return torch.threshold_(exponent, SMALLEST_EXPONENT[exponent.dtype], -math.inf).exp_()
