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
# Smallest factor that a sum of slopes is kept in units of: others can be divided by it without overflow.
SMALLEST_UNIT = 1e-20
# exp(scale * s) is summed without a running maximum while |scale * s| stays below this.
SAFE_EXPONENT = 60.0


class Workspace:
    """Buffers that tile after tile is written into: fresh memory for each costs more than the arithmetic."""

    def __init__(self, like: Tensor, size: int) -> None:
        self._like, self._size = like, size
        self._buffers: dict[Any, Tensor] = {}
        self._views: dict[Any, Tensor] = {}

    def take(self, key: Any, shape: torch.Size | tuple[int, int]) -> Tensor:
        view = self._views.get((key, shape))
        if view is None:
            if key not in self._buffers:
                self._buffers[key] = self._like.new_empty(self._size)
            view = self._views[key, shape] = self._buffers[key][: shape[0] * shape[1]].view(shape)
        return view


class Tile:
    """One block of the similarity matrix, (R, T), with its exponentials formed once for all statistics.

    It holds `u = unit * (s - origin)`: the matrix product scales and shifts for nothing, so that a lone
    `LogSumExp(unit)` or `Between` around the origin needs no pass for it. The origin is 0 unless every statistic is
    `any_origin`.
    """

    def __init__(self, u: Tensor, unit: float, origin: float, workspace: Workspace, keep: bool = False) -> None:
        self.u = u
        self.unit = unit
        self.origin = origin
        self._workspace = workspace
        self._keep = keep
        self._exp: dict[float, Tensor] = {}
        self.owner: int | str = "sweep"

    @property
    def s(self) -> Tensor:
        """The similarities, (R, T), in a buffer of their own."""
        return torch.mul(self.u, 1 / self.unit, out=self.scratch("s")).add_(self.origin)

    @property
    def excluded(self) -> Tensor:
        """True at excluded entries, (R, T)."""
        return self.u < self.unit * EXCLUDED / 2

    def scratch(self, key: Any) -> Tensor:
        """A buffer of the tile's shape that belongs to the statistic at work, until it asks for the same key again."""
        return self._workspace.take((self.owner, key), self.u.shape)

    def plan_scratch(self, key: str) -> Tensor:
        """A buffer of the tile's shape for the sweep itself."""
        return self._workspace.take(("sweep", key), self.u.shape)

    def is_shared(self, x: Tensor) -> bool:
        """Whether a tensor that a statistic returned is read by others as well."""
        return x is self.u or any(x is e for e in self._exp.values())

    def exponent(self, scale: float, out: Tensor) -> Tensor:
        """scale * (s - origin), (R, T), far below zero at excluded entries whatever the sign of the scale."""
        # The tile itself may be the buffer that is written: what is excluded is read off it first.
        excluded = None if scale > 0 else self.excluded
        torch.mul(self.u, scale / self.unit, out=out)
        return out if excluded is None else out.masked_fill_(excluded, EXCLUDED)

    def exp(self, scale: float, last: bool = False) -> Tensor:
        """e^{scale * (s - origin)}, (R, T), kept for whoever asks next; the `last` one may overwrite the tile."""
        if scale not in self._exp:
            if self._keep:
                out = torch.empty_like(self.u)
            else:
                out = self.u if last else self._workspace.take(("exp", scale), self.u.shape)
            self._exp[scale] = torch.exp(self.u, out=out) if scale == self.unit else self.exponent(scale, out).exp_()
        return self._exp[scale]

    def shifted_exp(self, scale: float, shift: Tensor) -> Tensor:
        """e^{scale * (s - origin) - shift}, (R, T)."""
        return self.exponent(scale, self.scratch("shifted")).sub_(shift).exp_()


Scaled = tuple[Tensor, float]
# Rows that a tile serves, and the axis of the tile that is summed over for them.
Side = tuple[slice, int]


class Statistic:
    """What an objective needs of each row. A new one defines the methods below and works for every objective.

    `parts(tile, e)` gives `width` summands f(s), each as a tensor (R, T) and a factor; `slopes(tile, e)` gives their
    derivatives f'(s) likewise; `e` is e^{scale * s - shift} where the class has a `scale`, else None. Both must vanish
    at s = EXCLUDED, and both are read before the next statistic is asked, so they may live in `tile.scratch`.
    `finish(sums, shift, count)` turns the sums (A,) into the statistic; autograd differentiates it.
    """

    width: ClassVar[int] = 1
    scale: ClassVar[float | None] = None
    # True if nothing but `e` is looked at: the exponential may then be formed in the tile's own memory.
    only_exponential: ClassVar[bool] = False
    # True if `tile.u` is read with regard to `tile.origin`, or not at all.
    any_origin: ClassVar[bool] = False

    def parts(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        raise NotImplementedError

    def slopes(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        raise NotImplementedError

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        return sums[0]


@dataclass(frozen=True)
class LogSumExp(Statistic):
    """log sum_j e^{scale s_ij}; -inf for a row without negatives."""

    scale: float  # type: ignore[misc]
    only_exponential = True
    any_origin = True

    def parts(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return ((e, 1.0),)

    def slopes(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return ((e, self.scale),)

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        some = count > 0
        return torch.where(some, torch.where(some, sums[0], 1.0).log() + shift, -math.inf)


@dataclass(frozen=True)
class SoftmaxMean(Statistic):
    """sum_j s_ij e^{scale s_ij} / sum_j e^{scale s_ij}; 0 for a row without negatives."""

    scale: float  # type: ignore[misc]
    width = 2

    def parts(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return (e, 1.0), (torch.mul(tile.u, e, out=tile.scratch("part")), 1 / tile.unit)

    def slopes(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return (e, self.scale), (
            torch.addcmul(e, tile.u, e, value=self.scale / tile.unit, out=tile.scratch("part")),
            1.0,
        )

    def finish(self, sums: tuple[Tensor, ...], shift: Tensor, count: Tensor) -> Tensor:
        some = count > 0
        return torch.where(some, sums[1] / torch.where(some, sums[0], 1.0), 0.0)


@dataclass(frozen=True)
class Sum(Statistic):
    """sum_j s_ij."""

    def parts(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return ((torch.where(tile.excluded, 0.0, tile.u), 1 / tile.unit),)

    def slopes(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return (((~tile.excluded).to(tile.u.dtype), 1.0),)


@dataclass(frozen=True)
class Between(Statistic):
    """sum_j max((high - s_ij)(s_ij - low), 0): how far inside an interval the similarities lie."""

    low: float
    high: float
    any_origin = True

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def parts(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        # half^2 - (s - middle)^2, cut off below: exact zeros outside.
        offset, half = self._offset(tile)
        peak = offset.new_full((), half**2)
        inside = torch.addcmul(peak, offset, offset, value=-1, out=tile.scratch("part")).relu_()
        return ((inside, 1 / tile.unit**2),)

    def slopes(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        # -2 (s - middle) inside and 0 outside: what the backward pass of a clamp does in one go.
        offset, half = self._offset(tile)
        inside = tile.scratch("part")
        torch.ops.aten.hardtanh_backward.grad_input(offset, offset, -half, half, grad_input=inside)
        return ((inside, -2 / tile.unit),)

    def _offset(self, tile: Tile) -> tuple[Tensor, float]:
        """unit * (s - middle), which is the tile itself where its origin is the middle; and its bound inside."""
        away = (self.middle - tile.origin) * tile.unit
        offset = torch.sub(tile.u, away, out=tile.scratch("part")) if away else tile.u
        return offset, (self.high - self.low) / 2 * tile.unit


@dataclass(frozen=True)
class Count(Statistic):
    """Number of negatives with low < s_ij < high; without gradient."""

    low: float
    high: float

    def parts(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        inside = (tile.u > self.low * tile.unit) & (tile.u < self.high * tile.unit)
        return ((inside.to(tile.u.dtype), 1.0),)

    def slopes(self, tile: Tile, e: Any) -> tuple[Scaled, ...]:
        return ((torch.zeros_like(tile.u), 1.0),)


@dataclass(frozen=True)
class Extreme:
    """Index of the negative with the largest (or smallest) similarity, (A,); -1 for a row without negatives.

    An index has no gradient: gather the similarity itself with `paired`, as the positives are.
    """

    largest: bool = True


AnyStatistic = Statistic | Extreme


@dataclass(frozen=True)
class Sweep:
    """The matrix to be swept: exclusions, and how its tiles are laid out."""

    excluded: Tensor  # (A, E)
    symmetric: bool
    side: int
    unit: float
    origin: float

    def sides(self, rows: slice, columns: slice) -> list[Side]:
        """What a tile is summed into: its rows and, off the diagonal of a symmetric matrix, its columns' rows."""
        return [(rows, 1), (columns, 0)] if self.symmetric and rows != columns else [(rows, 1)]

    def touched(self) -> set[tuple[int, int]] | None:
        """Tiles that hold an excluded entry; None on an accelerator, where asking costs more than writing."""
        if self.excluded.is_cuda:
            return None
        top = torch.arange(len(self.excluded)).div_(self.side, rounding_mode="floor").unsqueeze(1)
        left = self.excluded.div(self.side, rounding_mode="floor")  # -1 stays -1
        codes = (top << 32) + left
        return {divmod(code, 1 << 32) for code in codes[left >= 0].unique().tolist()}

    def tiles(self, x: Tensor, y: Tensor, workspace: Workspace, keep: bool) -> Iterator[tuple[slice, slice, Tile]]:
        """Yield (rows, columns, tile) with excluded entries set to EXCLUDED."""
        touched = self.touched()
        start = x.new_full((), -self.unit * self.origin)
        for top in range(0, len(x), self.side):
            rows = slice(top, min(top + self.side, len(x)))
            for left in range(top if self.symmetric else 0, len(y), self.side):
                columns = slice(left, min(left + self.side, len(y)))
                shape = (rows.stop - rows.start, columns.stop - columns.start)
                u = x.new_empty(shape) if keep else workspace.take("tile", shape)
                torch.addmm(start, x[rows], y[columns].T, beta=1 if self.origin else 0, alpha=self.unit, out=u)
                if touched is None or (top // self.side, left // self.side) in touched:
                    _exclude(u, self.excluded[rows] - left, self.unit * EXCLUDED)
                yield rows, columns, Tile(u, self.unit, self.origin, workspace, keep)


def _exclude(u: Tensor, index: Tensor, value: float) -> None:
    """Set the listed columns (R, E) of a tile (R, T) to a value; indices outside the tile do nothing."""
    here = (index >= 0) & (index < u.shape[1])
    # An entry outside writes +inf with amin, which changes nothing: no index has to be read back from the device.
    written = torch.where(here, value, math.inf).to(u.dtype)
    u.scatter_reduce_(1, index.clamp(0, u.shape[1] - 1), written, "amin")


class _RowSums(torch.autograd.Function):
    """(sums (N, A), shifts (S, A), indices (A,) ...); the shifts are constants of the caller's formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, sweep: Sweep, plan: "_Plan") -> tuple[Tensor, ...]:
        sums, shifts = plan.zeros(x), plan.start_shifts(x)
        best = [x.new_full((len(x),), -math.inf) for _ in plan.extremes]
        where = [torch.full((len(x),), -1, device=x.device) for _ in plan.extremes]
        keep = plan.fits(x, y, sweep.symmetric)
        kept: list[tuple[slice, slice, Tile]] = []
        workspace = Workspace(x, min(sweep.side, len(x)) * min(sweep.side, len(y)))
        for rows, columns, tile in sweep.tiles(x, y, workspace, keep):
            sides = sweep.sides(rows, columns)
            plan.add_extremes(tile, tile.u, rows, columns.start, best, where)
            if len(sides) == 2:
                plan.add_extremes(tile, tile.u.T, columns, rows.start, best, where)
            plan.add(tile, sides, sums, shifts)
            if keep:
                kept.append((rows, columns, tile))
        ctx.sweep, ctx.plan, ctx.kept, ctx.workspace = sweep, plan, kept, workspace
        ctx.save_for_backward(x, y, shifts)
        ctx.mark_non_differentiable(shifts, *where)
        return sums, shifts, *where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, y, shifts = ctx.saved_tensors
        sweep: Sweep = ctx.sweep
        dx = torch.zeros_like(x)
        dy = dx if sweep.symmetric else torch.zeros_like(y) if ctx.needs_input_grad[1] else None
        upstream = _Upstream(grad)
        for rows, columns, tile in ctx.kept or sweep.tiles(x, y, ctx.workspace, keep=False):
            slope = ctx.plan.slope(tile, sweep.sides(rows, columns), upstream, shifts)
            if slope.value is None:
                continue
            # A diagonal tile of the symmetric case holds (i, j) and (j, i), so it takes both products as well.
            dx[rows].addmm_(slope.value, y[columns], alpha=slope.unit)
            if dy is not None:
                dy[columns].addmm_(slope.value.T, x[rows], alpha=slope.unit)
        return (dx, None if sweep.symmetric else dy, None, None)


class _Plan:
    """Which summands are formed, and which of them need a running maximum."""

    def __init__(self, statistics: Sequence[AnyStatistic], bound: float) -> None:
        self.statistics = [stat for stat in statistics if isinstance(stat, Statistic)]
        self.extremes = [stat for stat in statistics if isinstance(stat, Extreme)]
        middles = [s.middle for s in self.statistics if isinstance(s, Between)]
        self.origin = middles[0] if middles and all(s.any_origin for s in self.statistics) else 0.0
        bound += abs(self.origin)
        self.running = [s.scale is not None and abs(s.scale) * bound > SAFE_EXPONENT for s in self.statistics]
        self.widths = [stat.width for stat in self.statistics]
        # The scale of the first exponential, so that it needs no pass of its own over the tile.
        self.unit = next((s.scale for s in self.statistics if s.scale is not None and s.scale > 0), 1.0)
        # What looks at the similarities comes first; the last exponential may then overwrite them.
        self.order = sorted(range(len(self.statistics)), key=lambda n: self.statistics[n].only_exponential)
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

    def add(self, tile: Tile, sides: Sequence[Side], sums: Tensor, shifts: Tensor) -> None:
        """Add a tile's summands to the rows it serves."""
        for number in self.order:
            stat = self.statistics[number]
            tile.owner = number
            if stat.scale is not None and self.running[number]:
                for rows, along in sides:
                    exponent = tile.exponent(stat.scale, tile.scratch("shifted"))
                    old = shifts[number, rows]
                    new = torch.maximum(old, exponent.amax(along))
                    sums[self.span(number), rows] *= (old - new).exp()
                    shifts[number, rows] = new
                    e = exponent.sub_(new.unsqueeze(along)).exp_()
                    self._sum(number, stat.parts(tile, e), [(rows, along)], sums)
            else:
                self._sum(number, stat.parts(tile, self._exp(tile, number)), sides, sums)

    def _exp(self, tile: Tile, number: int) -> Tensor | None:
        stat = self.statistics[number]
        if stat.scale is None:
            return None
        return tile.exp(stat.scale, last=stat.only_exponential and number == self.order[-1])

    def _sum(self, number: int, parts: tuple[Scaled, ...], sides: Sequence[Side], sums: Tensor) -> None:
        for slot, (part, factor) in zip(self.slots[number], parts, strict=True):
            for rows, along in sides:
                sums[slot, rows].add_(part.sum(along), alpha=factor)

    def add_extremes(
        self, tile: Tile, u: Tensor, rows: slice, first: int, best: list[Tensor], where: list[Tensor]
    ) -> None:
        nothing = tile.unit * EXCLUDED / 2
        for stat, values, index in zip(self.extremes, best, where, strict=True):
            signed = u if stat.largest else torch.where(u > nothing, -u, 2 * nothing)
            top, place = signed.max(1)
            better = (top > values[rows]) & (top > nothing)
            values[rows] = torch.where(better, top, values[rows])
            index[rows] = torch.where(better, place + first, index[rows])

    def slope(self, tile: Tile, sides: Sequence[Side], upstream: "_Upstream", shifts: Tensor) -> "_Total":
        """dL/ds of a tile, (R, T), over all statistics and all rows it serves."""
        total = _Total(tile)
        for number in self.order:
            stat = self.statistics[number]
            tile.owner = number
            if stat.scale is not None and self.running[number]:
                for side, along in sides:
                    e = tile.shifted_exp(stat.scale, shifts[number, side].unsqueeze(along))
                    self._weigh(total, tile, number, stat.slopes(tile, e), [(side, along)], upstream)
            else:
                self._weigh(total, tile, number, stat.slopes(tile, self._exp(tile, number)), sides, upstream)
        return total

    def _weigh(
        self,
        total: "_Total",
        tile: Tile,
        number: int,
        slopes: tuple[Scaled, ...],
        sides: Sequence[Side],
        upstream: "_Upstream",
    ) -> None:
        for slot, (slope, factor) in zip(self.slots[number], slopes, strict=True):
            # Only this statistic uses the buffer, and only once for this tile.
            own = not self.running[number] and not tile.is_shared(slope)
            common = upstream.common[slot]
            if common is not None:
                total.add_evenly(slope, common * factor * len(sides), own)
            else:
                weights = [(upstream.grad[slot, side] * factor).unsqueeze(along) for side, along in sides]
                total.add_weighted(slope, weights, own)


class _Total:
    """A weighted sum of slopes, unit * value; `value` is None while nothing was added.

    The first summand that all rows weigh alike becomes the value as it is, and its weight the unit: the matrix products
    that follow multiply by it for nothing.
    """

    def __init__(self, tile: Tile) -> None:
        self.value: Tensor | None = None
        self.unit = 1.0
        self._tile = tile

    def add_evenly(self, slope: Tensor, weight: float, own: bool) -> None:
        """Add weight * slope, in the slope's own memory if it may be written."""
        if not weight:
            return
        if self.value is not None:
            self.value.add_(slope, alpha=weight / self.unit)
        elif own and abs(weight) > SMALLEST_UNIT:
            self.value, self.unit = slope, weight
        else:
            self.value = torch.mul(slope, weight, out=slope if own else self._tile.plan_scratch("total"))

    def add_weighted(self, slope: Tensor, weights: Sequence[Tensor], own: bool) -> None:
        """Add sum(weights) * slope, with one weight (R, 1) or another (1, T)."""
        if self.value is not None:
            weight = weights[0] if len(weights) == 1 else torch.add(*weights, out=self._tile.plan_scratch("weights"))
            self.value.addcmul_(slope, weight, value=1 / self.unit)
        elif len(weights) == 1:
            self.value = torch.mul(slope, weights[0], out=slope if own else self._tile.plan_scratch("total"))
        else:
            # The weights become the total: a buffer less in the processor's cache.
            self.value = torch.add(*weights, out=self._tile.plan_scratch("total")).mul_(slope)


class _Upstream:
    """Gradient of the sums (N, A); a row of equal numbers (a plain mean over anchors) is also held as that number."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad
        self.common: list[float | None] = [None] * len(grad)
        if not grad.is_cuda:  # asking an accelerator would cost a synchronisation
            low, high = grad.aminmax(dim=1)
            self.common = [float(a) if a == b else None for a, b in zip(low, high, strict=True)]


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
    first: int = 0,
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
        first: columns before it take part in no row.
        tile: rows and columns of a tile; by default TILE on a CPU and eight times that on an accelerator.

    Returns:
        A tensor (A,) for each statistic; indices for `Extreme`.
    """
    wanted = list(dict.fromkeys(statistics))
    if first:
        y, excluded = y[first:], excluded - first
        excluded = excluded.clamp_min(-1)
    if bound is None:
        bound = math.inf if x.is_cuda else float(_longest(x) * _longest(y))
    side = tile or (TILE if x.device.type == "cpu" else 8 * TILE)
    plan = _Plan(wanted, bound)
    sweep = Sweep(excluded, symmetric, side, plan.unit, plan.origin)
    with torch.autocast(x.device.type, enabled=False):
        sums, shifts, *where = _RowSums.apply(x, y, sweep, plan)  # type: ignore[no-untyped-call]
    where = [torch.where(place < 0, place, place + first) for place in where] if first else where
    results: dict[AnyStatistic, Tensor] = dict(zip(plan.extremes, where, strict=True))
    for number, stat in enumerate(plan.statistics):
        shift = shifts[number] + (stat.scale or 0) * plan.origin
        results[stat] = stat.finish(tuple(sums[plan.span(number)]), shift, counts)
    return results


def _longest(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x.detach(), dim=1).max()
    return length
