"""The sweep: every statistic of every objective from one visit to the tiles of the similarity matrix.

The forward pass adds up the parts of all statistics tile by tile and throws the tile away; the backward pass forms it
again, builds `dL/ds` of all statistics at once, and multiplies it into the embeddings. Memory is O((A + C) d + tile).
A matrix whose tiles fit CACHE_BYTES is kept instead of formed again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dipole.core.objectives import engine
from dipole.core.objectives.dense import LOWEST, exp_below, needs_maximum, parts_of, slopes_of, sweep_again
from dipole.core.objectives.statistics import AnyStatistic, Extreme, Statistic, as_tuple
from dipole.core.objectives.tile import Side, Tile, Tiling
from dipole.core.utils.uncompiled import uncompiled

TILE = 512
CACHE_BYTES = 32 << 20


@dataclass(frozen=True)
class Term:
    """A statistic in the sweep: its rows of `shifts` and `sums`, and whether it needs a running maximum."""

    statistic: Statistic
    number: int
    slots: slice
    running: bool

    def groups(self, tile: Tile) -> Sequence[tuple[Side, ...]]:
        """The sides that share an exponential: all, unless each row subtracts a maximum of its own."""
        return [(side,) for side in tile.sides] if self.running else [tile.sides]

    def exp(self, tile: Tile, side: Side, shifts: Tensor) -> Tensor | None:
        """e^{scale s - shift}, (R, T), 0 where excluded; None without a scale."""
        scale = self.statistic.scale
        if scale is None:
            return None
        if not self.running:
            return tile.exp(scale)
        shifted = (scale * tile.s).sub_(shifts[self.number, side.rows].unsqueeze(side.axis))
        return tile.allowed_(exp_below(shifted), 0.0)

    def add(self, tile: Tile, sums: Tensor, shifts: Tensor) -> None:
        """Add a tile's parts to the sums (N, A) of the rows it serves."""
        for sides in self.groups(tile):
            if self.running:
                self._raise_shift(tile, sides[0], sums, shifts)
            e = self.exp(tile, sides[0], shifts)
            for total, part in zip(sums[self.slots], as_tuple(self.statistic.parts(tile.s, e)), strict=True):
                part = part if part is e else tile.allowed(part, 0.0)
                for side in sides:
                    total[side.rows] += part.sum(side.axis)

    def _raise_shift(self, tile: Tile, side: Side, sums: Tensor, shifts: Tensor) -> None:
        scale = self.statistic.scale
        assert scale is not None
        if _rises(scale):
            top = scale * tile.allowed(tile.s, -math.inf).amax(side.axis)
        else:
            top = scale * tile.allowed(tile.s, math.inf).amin(side.axis)
        old = shifts[self.number, side.rows]
        new = torch.maximum(old, top)
        sums[self.slots, side.rows] *= (old - new).exp()
        shifts[self.number, side.rows] = new

    def slopes(self, tile: Tile, grad: Tensor, shifts: Tensor, mirrored: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Slopes (R, T) and what each weighs, (R, 1), (1, T) or (R, T); grad (N, A) is that of the sums.

        `mirrored` adds the transpose of a diagonal tile, whose slopes are as symmetric as s without running maxima.
        """
        for sides in self.groups(tile):
            slopes, factor = slopes_of(self.statistic, tile.s, self.exp(tile, sides[0], shifts))
            for upstream, slope in zip(grad[self.slots], slopes, strict=True):
                weights = [factor * upstream[side.rows].unsqueeze(side.axis) for side in sides]
                if mirrored:
                    weights.append(weights[0].T)
                yield slope, weights[0] if len(weights) == 1 else weights[0] + weights[1]


class _Sweep(torch.autograd.Function):
    """(sums (N, A), shifts (S, A), indices (A,) ...); the shifts are constants of the caller's formula."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, tiling: Tiling, terms: list[Term], extremes: list[Extreme]
    ) -> tuple[Tensor, ...]:
        sums = x.new_zeros(terms[-1].slots.stop if terms else 0, len(x))
        shifts = torch.stack([x.new_full((len(x),), LOWEST if t.running else 0.0) for t in terms] or [x.new_zeros(0)])
        best = [x.new_full((len(x),), -math.inf) for _ in extremes]
        where = [torch.full((len(x),), -1, device=x.device) for _ in extremes]
        kinds = 1 + len({t.statistic.scale for t in terms if t.statistic.scale is not None and not t.running})
        size = kinds * len(x) * len(y) * x.element_size() // (2 if tiling.symmetric else 1)
        kept: list[Tile] = []
        for tile in tiling.tiles(x, y):
            for term in terms:
                term.add(tile, sums, shifts)
            for extreme, value, index in zip(extremes, best, where, strict=True):
                add_extreme(extreme, tile, value, index)
            if size <= CACHE_BYTES:
                kept.append(tile)
        ctx.tiling, ctx.terms, ctx.kept = tiling, terms, [tile.emptied() for tile in kept]
        ctx.save_for_backward(x, y, shifts, *(tensor for tile in kept for tensor in tile.tensors()))
        ctx.mark_non_differentiable(shifts, *where)
        return sums, shifts, *where

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, y, shifts, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = sweep_again(
                [term.statistic for term in ctx.terms],
                x,
                y,
                ctx.tiling.excluded,
                shifts,
                grad,
                symmetric=ctx.tiling.symmetric,
                candidates=ctx.needs_input_grad[1],
            )
            return *found, None, None, None
        dx = torch.zeros_like(x)
        dy = dx if ctx.tiling.symmetric else torch.zeros_like(y) if ctx.needs_input_grad[1] else None
        running = any(term.running for term in ctx.terms)
        for tile in _filled(ctx.kept, tensors) if ctx.kept else ctx.tiling.tiles(x, y):
            # On the diagonal of the symmetric case one product serves (i, j) and (j, i).
            diagonal = ctx.tiling.symmetric and len(tile.sides) == 1
            total = slope_of(tile, ctx.terms, grad, shifts, diagonal and not running)
            if diagonal:
                dx[tile.rows].addmm_(total + total.T if running else total, x[tile.rows])
                continue
            dx[tile.rows].addmm_(total, y[tile.columns])
            if dy is not None:
                dy[tile.columns].addmm_(total.T, x[tile.rows])
        return dx, None if ctx.tiling.symmetric else dy, None, None, None


def slope_of(tile: Tile, terms: Sequence[Term], grad: Tensor, shifts: Tensor, mirrored: bool = False) -> Tensor:
    """dL/ds of a tile, (R, T), from the gradient (N, A) of the sums; 0 where excluded."""
    total: Tensor | None = None
    for term in terms:
        for slope, weight in term.slopes(tile, grad, shifts, mirrored):
            total = slope * weight if total is None else total.addcmul_(slope, weight)
    assert total is not None  # without a sum there is no gradient to come here with
    return tile.allowed_(total, 0.0)


def _filled(tiles: Sequence[Tile], tensors: Sequence[Tensor]) -> Iterator[Tile]:
    """Kept tiles with the tensors that were saved of them."""
    start = 0
    for tile in tiles:
        stop = start + len(tile.tensors())
        yield tile.filled(tensors[start:stop])
        start = stop


def add_extreme(extreme: Extreme, tile: Tile, best: Tensor, where: Tensor) -> None:
    """Update the best value (A,) and its column (A,) of the rows a tile serves."""
    values = tile.allowed(tile.s if extreme.largest else -tile.s, -math.inf)
    for side in tile.sides:
        top, place = values.max(side.axis)
        first = (tile.columns if side.axis else tile.rows).start
        better = top > best[side.rows]
        best[side.rows] = torch.where(better, top, best[side.rows])
        where[side.rows] = torch.where(better, place + first, where[side.rows])


def terms_of(statistics: Sequence[Statistic], x: Tensor, bound: float) -> list[Term]:
    terms: list[Term] = []
    stop = 0
    for number, statistic in enumerate(statistics):
        start, stop = stop, stop + len(parts_of(statistic))
        terms.append(Term(statistic, number, slice(start, stop), needs_maximum(statistic, bound)))
    return terms


@uncompiled
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
    first: int = 0,
    embeddings: tuple[Tensor, Tensor] | None = None,
) -> dict[AnyStatistic, Tensor]:
    """Compute all statistics of the rows of x y^T in one sweep, forward and backward.

    Args:
        x: (A, d); y: (C, d); the same tensor if `symmetric`.
        excluded: (A, E) columns that do not take part in a row; -1 pads.
        statistics: what is wanted; equal ones are computed once.
        counts: (A,) number of columns that take part in each row.
        bound: largest |x_i . y_j| that can occur; None if unknown.
        symmetric: x is y, `first` is 0, and j is excluded for i exactly if i is for j.
        tile: rows and columns of a tile; by default TILE on a CPU and eight times that on an accelerator.
        first: columns before it take part in no row.
        embeddings: of which the rows of x and y are multiples, in the dtype they came in; fused kernels multiply those
            where they are in half precision.

    Returns:
        A tensor (A,) for each statistic; indices for `Extreme`.
    """
    on_cpu = x.device.type == "cpu"
    if first:
        y, excluded = y[first:], excluded - first
        embeddings = embeddings and (embeddings[0], embeddings[1][first:])
    if bound is None:
        bound = float(longest(x) * longest(y)) if on_cpu and len(y) else math.inf
    results: dict[AnyStatistic, Tensor] = {}
    wanted = list(dict.fromkeys(statistics))
    if tile is None:
        in_kernels = engine.supported(wanted, x)
        terms, extremes = _split(in_kernels, x, bound)
        asked, running = [term.statistic for term in terms], [term.running for term in terms]
        found = engine.sums(x, y, excluded, asked, running, extremes, symmetric, embeddings) if in_kernels else None
        if found is not None:
            results |= _finish(found, terms, extremes, counts, first)
    wanted = [each for each in wanted if each not in results]
    if wanted:
        terms, extremes = _split(wanted, x, bound)
        tiling = Tiling(excluded, symmetric, tile or (TILE if on_cpu else 8 * TILE))
        tiles: tuple[Tensor, ...] = _Sweep.apply(x, y, tiling, terms, extremes)  # type: ignore[no-untyped-call]
        results |= _finish(tiles, terms, extremes, counts, first)
    return results


def _split(statistics: Sequence[AnyStatistic], x: Tensor, bound: float) -> tuple[list[Term], list[Extreme]]:
    """Return the statistics with a sum and those with an index."""
    extremes = [each for each in statistics if isinstance(each, Extreme)]
    return terms_of([each for each in statistics if isinstance(each, Statistic)], x, bound), extremes


def _finish(
    found: Sequence[Tensor], terms: Sequence[Term], extremes: Sequence[Extreme], counts: Tensor, first: int
) -> dict[AnyStatistic, Tensor]:
    """Return the statistics from the sums, shifts and indices of a sweep."""
    sums, shifts, *where = found
    results: dict[AnyStatistic, Tensor] = {}
    for extreme, index in zip(extremes, where, strict=True):
        results[extreme] = torch.where(index < 0, index, index + first)
    for term in terms:
        results[term.statistic] = term.statistic.finish(tuple(sums[term.slots]), shifts[term.number], counts)
    return results


def longest(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x.detach(), dim=1).max()
    return length


def _rises(scale: float | Tensor) -> bool:
    """Whether the largest similarity has the largest exponent; learned scales are positive."""
    return isinstance(scale, Tensor) or scale > 0
