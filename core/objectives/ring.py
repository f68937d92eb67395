"""The sweep over candidates that lie on several ranks: they travel round a ring while it looks at those it has.

Each rank keeps its anchors and sends its projected candidates to the rank before it, hop by hop; what comes by is swept
like any matrix, and row statistics are added up as they arrive. In the backward pass the candidates travel again, and
what is found for their gradient goes straight home. Memory is that of a rank's own rows and a few shares under way.

Where anchors are the candidates, a block (rows of one rank, rows of another) serves both ranks, so the candidates
travel half way only: each block is formed by one rank, which sends the other rank its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dipole.core.objectives import engine
from dipole.core.objectives.dense import LOWEST
from dipole.core.objectives.similarity import paired
from dipole.core.objectives.statistics import AnyStatistic, Extreme, Statistic
from dipole.core.objectives.sweep import TILE, Term, add_extreme, longest, slope_of, terms_of
from dipole.core.objectives.tile import Side, Tile, Tiling
from dipole.core.objectives.travelling import Shares, Travelling
from dipole.core.utils.distributed import Exchange, all_max, rank, round_trip, world_size
from dipole.core.utils.uncompiled import uncompiled

if TYPE_CHECKING:
    from dipole.core.objectives.kernels.launch import Sweep
    from dipole.core.objectives.objective import Objective
    from dipole.core.objectives.pairs import Pairs


class Circling(Travelling):
    """Projected candidates (C, d) of all ranks, numbered anew: those of rank 0 first, what all ranks hold last."""

    course: Course


@dataclass(frozen=True)
class Course:
    """Which candidates lie where.

    Args:
        sizes: candidates of each rank.
        first: so many of each rank's, and of what all hold, come first and take part in no row.
        columns: (C,) the candidate that each row is.
        position: (C,) the row that each candidate is.
        lists: positives of each rank's anchors, (A, K) each, where anchors are the candidates and i excludes j exactly
            if j excludes i; else None.
    """

    sizes: list[int]
    first: list[int]
    columns: Tensor
    position: Tensor
    lists: tuple[Tensor, ...] | None

    def rows(self, index: Tensor) -> Tensor:
        """The rows that listed candidates are; -1 stays."""
        return torch.where(index < 0, -1, self.position[index.clamp_min(0)])

    def start(self, owner: int) -> int:
        """The first row of a rank; of what all hold, if it is the number of ranks."""
        return sum(self.sizes[:owner])

    def block(self, owner: int, hop: int) -> tuple[slice, slice]:
        """This rank's rows and the other's that this rank looks at; each pair of rows is one rank's."""
        ranks, me = len(self.sizes), rank()
        whole = slice(0, self.sizes[me]), slice(0, self.sizes[owner])
        if 2 * hop < ranks:
            return whole
        # Half way round, each of two ranks meets the other: the higher one's rows are shared out.
        half = (self.sizes[max(me, owner)] + 1) // 2
        return (whole[0], slice(0, half)) if me < owner else (slice(half, self.sizes[me]), whole[1])


def projected(term: Objective, pairs: Pairs) -> tuple[Tensor, Circling, float | None]:
    """x of this rank's anchors, y of candidates that travel, and the bound of |x . y|."""
    candidates = pairs.candidates
    assert isinstance(candidates, Travelling)
    shares, places, ranks = candidates.shares, candidates.places, world_size()
    owner = shares.owner(places)
    group = torch.where(owner < 0, ranks, owner)  # (C,)
    *sizes, _ = torch.bincount(group, minlength=ranks + 1).tolist()
    first = torch.bincount(group[: pairs.first_negative], minlength=ranks + 1).tolist()
    columns = group.argsort(stable=True)
    position = torch.empty_like(columns).scatter_(0, columns, torch.arange(len(columns)))
    if candidates.lists is None:
        own = shares.mine(places[owner == rank()]).to(candidates.dtype)
        held = shares.of_all(places[owner < 0]).to(candidates.dtype) if shares.held else own[:0]
        x, y, bound = term.project(replace(pairs, candidates=torch.cat([own, held]) if len(held) else own))
        own, held = y[: len(own)], y[len(own) :]
    else:
        x, own, bound = term.project(replace(pairs, candidates=pairs.anchors))
        held = own[:0]
    under_way = Shares()
    under_way.tables.append((own, sizes))
    under_way.held.append(held)
    total = sum(sizes)
    circling = Circling(under_way, torch.where(position < total, position, total - 1 - position), own.dtype)
    device = own.device
    circling.course = Course(
        sizes,
        first,
        columns.to(device, non_blocking=True),
        position.to(device, non_blocking=True),
        candidates.lists if x is own else None,
    )
    return x, circling, bound


def round_statistics(
    x: Tensor, y: Circling, pairs: Pairs, statistics: Sequence[AnyStatistic], bound: float | None
) -> tuple[dict[AnyStatistic, Tensor], Tensor]:
    """`sweep.row_statistics` of this rank's anchors over the candidates of all, and similarities of the positives.

    Args:
        x: (A, d) projected anchors.
        y: projected candidates.
        pairs: of this rank's anchors.
        statistics: what is wanted.
        bound: largest |x_i . y_j| that can occur; None if unknown.
    """
    own, held = y.shares.tables[0][0], y.shares.held[0]
    if bound is None:
        # Ranks must agree on which exponentials run under a maximum.
        on_cpu = x.device.type == "cpu"
        both = torch.stack([_length(x), torch.maximum(_length(own), _length(held))]) if on_cpu else None
        bound = math.inf if both is None else math.prod(all_max(both).tolist())
    wanted = list(dict.fromkeys(statistics))
    terms = terms_of([each for each in wanted if isinstance(each, Statistic)], x, bound)
    extremes = [each for each in wanted if isinstance(each, Extreme)]
    course = y.course
    job = _Job(course, course.rows(pairs.excluded), course.rows(pairs.positives), terms, extremes)
    sums, shifts, near, *where = _run(x, own, held, job)
    results: dict[AnyStatistic, Tensor] = dict(zip(extremes, where, strict=True))
    for term in terms:
        results[term.statistic] = term.statistic.finish(
            tuple(sums[term.slots]), shifts[term.number], pairs.negative_counts
        )
    return results, near


def round_paired(x: Tensor, y: Circling, index: Tensor) -> Tensor:
    """`similarity.paired` with candidates of all ranks: similarities (A, n) of each anchor with those listed for it."""
    course = replace(y.course, lists=None)
    own, held = y.shares.tables[0][0], y.shares.held[0]
    near: Tensor = _run(x, own, held, _Job(course, index[:, :0], course.rows(index), [], []))[2]
    return near


def _length(x: Tensor) -> Tensor:
    return longest(x) if len(x) else x.new_zeros(())


@dataclass(frozen=True)
class _Job:
    """What is asked of the rows.

    Args:
        excluded: (A, E) rows of the course; listed: (A, K) the same.
    """

    course: Course
    excluded: Tensor
    listed: Tensor
    terms: list[Term]
    extremes: list[Extreme]

    @property
    def half(self) -> bool:
        return self.course.lists is not None

    @property
    def hops(self) -> int:
        ranks = len(self.course.sizes)
        return ranks // 2 if self.half else ranks - 1

    @property
    def slots(self) -> int:
        return self.terms[-1].slots.stop if self.terms else 0


@uncompiled
def _run(x: Tensor, own: Tensor, held: Tensor, job: _Job) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Ring.apply(x, None if job.half else own, held, job)  # type: ignore[no-untyped-call]
    return found


class _Block:
    """Some of this rank's rows against some of another's, of its own, or of what all hold.

    Args:
        rows: those of this rank, (R, d) in `x`.
        start: row of the course that `y` (T, d) begins with.
        first: so many of y take part in no row.
        symmetric: x and y are the same rows.
        other: (T, K) what is listed for the rows of y, which the block then serves as well; None if it does not.
    """

    def __init__(
        self,
        job: _Job,
        x: Tensor,
        y: Tensor,
        start: int,
        *,
        rows: slice | None = None,
        first: int = 0,
        symmetric: bool = False,
        other: Tensor | None = None,
    ) -> None:
        self.job, self.start, self.first, self.symmetric, self.other = job, start, first, symmetric, other
        self.rows = slice(0, len(x)) if rows is None else rows
        self.x, self.y = x[self.rows], y

    @property
    def served(self) -> int:
        return len(self.x) + (0 if self.other is None else len(self.y))

    def tiles(self) -> Iterator[Tile]:
        """Tiles of the columns that take part; rows of y that are served stand behind those of x."""
        if not self.job.terms and not self.job.extremes:
            return
        side = TILE if self.x.device.type == "cpu" else 8 * TILE
        excluded = self.job.excluded[self.rows] - (self.start + self.first)
        for tile in Tiling(excluded, self.symmetric, side).tiles(self.x, self.y[self.first :]):
            if self.other is None:
                yield tile
            else:
                behind = slice(tile.columns.start + len(self.x), tile.columns.stop + len(self.x))
                yield replace(tile, sides=(*tile.sides, Side(behind, 0)))

    @cached_property
    def kernels(self) -> Sweep | None:
        """The block as fused kernels see it; None where tiles serve.

        The lists of the rows of x tell the exclusions of those of y as well: a block serves both where i excludes j
        exactly if j excludes i.
        """
        terms, mutual = self.job.terms, self.other is not None
        if not (terms or self.job.extremes) or not len(self.x) or not len(self._seen):
            return None
        excluded = self.job.excluded[self.rows] - (self.start + self.first)
        running = [term.running for term in terms]
        asked = [term.statistic for term in terms], running, self.job.extremes, self.symmetric
        summands = engine.trusted(self.x, excluded, *asked, mutual=mutual)
        if summands is None:
            return None
        from dipole.core.objectives.kernels.fused import sweep_of

        kinds = summands, self.job.extremes, self.symmetric
        return sweep_of(self.x, self._seen, excluded, *kinds, tune=engine.tunes(self.x), mutual=mutual)

    @property
    def _seen(self) -> Tensor:
        """The rows of y that take part; those of x where they are the same, which no kernel reads twice."""
        return self.x if self.symmetric else self.y[self.first :]

    def look(self) -> _Totals:
        """What the block adds to the rows it serves."""
        found = _Totals.nothing(self.job, self.x, self.served)
        if self.kernels is None:
            for tile in self.tiles():
                for term in self.job.terms:
                    term.add(tile, found.sums, found.shifts)
                for extreme, value, index in zip(self.job.extremes, found.best, found.where, strict=True):
                    add_extreme(extreme, tile, value, index)
        else:
            for name, value in self.kernels.totals().items():
                getattr(found, name).copy_(value)
        here = self.job.course.start(rank()) + self.rows.start
        for index in found.where:  # so far places in this block
            mine, theirs = index[: len(self.x)], index[len(self.x) :]
            for part, begin in ((mine, self.start + self.first), (theirs, here)):
                part.copy_(torch.where(part < 0, -1, self.job.course.columns[(part + begin).clamp_min(0)]))
        for side in self._near():
            found.near[side.served] += side.values()
        return found

    def push(self, grad: Tensor, shifts: Tensor, near: Tensor, dx: Tensor, dy: Tensor | None) -> None:
        """Add the gradients of x (A, d) and y (T, d); grad (N, n), shifts (S, n) and near (n, K) of the rows served."""
        dx_rows, dy_rows = dx[self.rows], None if dy is None else dy[self.first :]
        if self.job.terms and self.kernels is not None:
            apart = dy_rows is not None and not self.symmetric
            found, of_y = self.kernels.gradients(self.x, self._seen, grad, shifts, apart)
            dx_rows += found
            if of_y is not None and dy_rows is not None:
                dy_rows += of_y
        elif self.job.terms:
            for tile in self.tiles():
                slope = slope_of(tile, self.job.terms, grad, shifts)
                dx_rows[tile.rows].addmm_(slope, self.y[self.first :][tile.columns])
                if dy_rows is not None:
                    dy_rows[tile.columns].addmm_(slope.T, self.x[tile.rows])
        for side in self._near():
            sides = (dx[self.rows], dy) if side.served.start == 0 else (dy, dx[self.rows])
            side.push(near[side.served], *sides)

    def _near(self) -> Iterator[_Near]:
        """Listed pairs that lie in this block."""
        count = len(self.x)
        sides = [_Near(slice(0, count), self.x, self.y, self.job.listed[self.rows] - self.start)]
        if self.other is not None:
            begin = self.job.course.start(rank()) + self.rows.start
            sides.append(_Near(slice(count, self.served), self.y, self.x, self.other - begin))
        # An accelerator would have to wait for the answer to whether there are any.
        yield from (each for each in sides if each.index.numel() and len(each.y) and each.any())


@dataclass(frozen=True)
class _Near:
    """Similarities of x with listed rows of y; `index` (A, K) may point outside."""

    served: slice
    x: Tensor
    y: Tensor
    index: Tensor

    @property
    def inside(self) -> Tensor:
        return (self.index >= 0) & (self.index < len(self.y))

    def any(self) -> bool:
        return not self.index.is_cpu or bool(self.inside.any())

    def values(self) -> Tensor:
        """(A, K), 0 for what lies outside."""
        return torch.where(self.inside, paired(self.x, self.y, torch.where(self.inside, self.index, -1)), 0.0)

    def push(self, grad: Tensor, dx: Tensor | None, dy: Tensor | None) -> None:
        with torch.enable_grad():
            x, y = self.x.detach().requires_grad_(), self.y.detach().requires_grad_()
            values = replace(self, x=x, y=y).values()
        for total, found in zip((dx, dy), torch.autograd.grad(values, (x, y), grad), strict=True):
            if total is not None:
                total += found


@dataclass
class _Totals:
    """What is known of rows so far: sums (N, A), shifts (S, A), extremes and their candidates, near (A, K)."""

    job: _Job = field(repr=False)
    sums: Tensor
    shifts: Tensor
    best: Tensor  # (X, A)
    where: Tensor  # (X, A)
    near: Tensor

    @classmethod
    def nothing(cls, job: _Job, like: Tensor, count: int) -> _Totals:
        lowest = [like.new_full((count,), LOWEST if term.running else 0.0) for term in job.terms]
        return cls(
            job,
            like.new_zeros(job.slots, count),
            torch.stack(lowest) if lowest else like.new_zeros(0, count),
            like.new_full((len(job.extremes), count), -math.inf),
            torch.full((len(job.extremes), count), -1, device=like.device),
            like.new_zeros(count, job.listed.shape[1]),
        )

    def part(self, rows: slice) -> _Totals:
        """The same of some rows, a view."""
        one, two = self.sums[:, rows], self.shifts[:, rows]
        return _Totals(self.job, one, two, self.best[:, rows], self.where[:, rows], self.near[rows])

    def add(self, other: _Totals) -> None:
        """Join what another block says of the same rows."""
        top = torch.maximum(self.shifts, other.shifts)
        mine, theirs = (self.shifts - top).exp_(), (other.shifts - top).exp_()
        for term in self.job.terms:
            ours, new = self.sums[term.slots], other.sums[term.slots]
            ours.mul_(mine[term.number]).add_(new * theirs[term.number])
        self.shifts.copy_(top)
        # Among equals the first candidate, in whatever order they came by.
        better = (other.best > self.best) | ((other.best == self.best) & (other.where < self.where))
        better &= other.where >= 0
        self.best.copy_(torch.where(better, other.best, self.best))
        self.where.copy_(torch.where(better, other.where, self.where))
        self.near += other.near

    def send(self, to: int, source: int, count: int) -> _Arriving:
        """Send them to the rank whose rows they are, while those of `count` rows of this rank come from another."""
        numbers = torch.cat([self.sums, self.shifts, self.best, self.near.T])
        exchanges = [Exchange(numbers, to, numbers.new_empty(len(numbers), count), source)]
        if len(self.where):
            where = self.where.contiguous()
            exchanges.append(Exchange(where, to, where.new_empty(len(where), count), source))
        return _Arriving(self.job, exchanges)


@dataclass(frozen=True)
class _Arriving:
    """Totals under way."""

    job: _Job
    exchanges: list[Exchange]

    def wait(self) -> _Totals:
        numbers, *where = [each.wait() for each in self.exchanges]
        job = self.job
        lengths = [job.slots, len(job.terms), len(job.extremes), job.listed.shape[1]]
        sums, shifts, best, near = numbers.split(lengths)
        return _Totals(job, sums, shifts, best, where[0] if where else best.long(), near.T)


class _Ring(torch.autograd.Function):
    """(sums (N, A), shifts (S, A), near (A, K), candidates (A,) ...); where `own` is None, anchors are candidates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor | None, held: Tensor, job: _Job) -> tuple[Tensor, ...]:
        course, me, ranks = job.course, rank(), len(job.course.sizes)
        totals = _Totals.nothing(job, x, len(x))
        arriving: _Arriving | None = None
        mine = (x if own is None else own).contiguous()
        for hop, (owner, rows) in enumerate(round_trip(mine, course.sizes, job.hops)):
            if own is not None or not hop:
                totals.add(_among(job, x, rows, owner).look())
                continue
            block, theirs = _between(job, x, rows, owner, hop)
            found = block.look()
            totals.part(block.rows).add(found.part(slice(0, len(block.x))))
            back = _Totals.nothing(job, x, course.sizes[owner])
            back.part(theirs).add(found.part(slice(len(block.x), None)))
            if arriving is not None:
                totals.add(arriving.wait())
            arriving = back.send(owner, (me - hop) % ranks, len(x))
        if arriving is not None:
            totals.add(arriving.wait())
        if len(held):
            totals.add(_among(job, x, held, ranks).look())
        ctx.job = job
        ctx.save_for_backward(x, own, held, totals.shifts)
        where = tuple(totals.where)
        ctx.mark_non_differentiable(totals.shifts, *where)
        return totals.sums, totals.shifts, totals.near, *where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, near: Tensor, *__: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        x, own, held, shifts = ctx.saved_tensors
        course, me, ranks = job.course, rank(), len(job.course.sizes)
        dx = torch.zeros_like(x)
        d_own = None if own is None or not ctx.needs_input_grad[1] else torch.zeros_like(own)
        d_held = torch.zeros_like(held) if ctx.needs_input_grad[2] and len(held) else None
        home = dx if own is None else d_own  # what other ranks find for this rank's candidates
        width, lengths = x.shape[1], [x.shape[1], len(grad), len(shifts), near.shape[1]]
        # A block that serves two ranks needs what both ask of their rows.
        mine = torch.cat([x, grad.T, shifts.T, near], 1) if own is None else own
        arriving: Exchange | None = None
        for hop, (owner, rows) in enumerate(round_trip(mine.contiguous(), course.sizes, job.hops)):
            if not hop:
                _among(job, x, rows[:, :width], owner).push(grad, shifts, near, dx, home)
                continue
            theirs = None if home is None else rows.new_zeros(len(rows), width)
            if own is None:
                assert theirs is not None
                y, their_grad, their_shifts, their_near = rows.split(lengths, 1)
                block, part = _between(job, x, y, owner, hop)
                block.push(
                    torch.cat([grad[:, block.rows], their_grad[part].T], 1),
                    torch.cat([shifts[:, block.rows], their_shifts[part].T], 1),
                    torch.cat([near[block.rows], their_near[part]]),
                    dx,
                    theirs[part],
                )
            else:
                _among(job, x, rows, owner).push(grad, shifts, near, dx, theirs)
            if home is not None and theirs is not None:
                if arriving is not None:
                    home += arriving.wait()
                arriving = Exchange(theirs, owner, torch.empty_like(home), (me - hop) % ranks)
        if home is not None and arriving is not None:
            home += arriving.wait()
        if len(held):
            _among(job, x, held, ranks).push(grad, shifts, near, dx, d_held)
        return dx, d_own, d_held, None


def _among(job: _Job, x: Tensor, y: Tensor, owner: int) -> _Block:
    """This rank's rows against all of another's, of its own, or (owner = number of ranks) of what all hold."""
    course = job.course
    return _Block(job, x, y, course.start(owner), first=course.first[owner], symmetric=job.half)


def _between(job: _Job, x: Tensor, y: Tensor, owner: int, hop: int) -> tuple[_Block, slice]:
    """The block of two ranks' rows that this rank forms for both, and which of the other's rows it has."""
    course = job.course
    assert course.lists is not None
    rows, theirs = course.block(owner, hop)
    other = course.rows(course.lists[owner][theirs])
    return _Block(job, x, y[theirs], course.start(owner) + theirs.start, rows=rows, other=other), theirs
