# ruff: noqa: RUF005 (Triton knows no star in a tuple)
"""The two kernels: `forward` sums the statistics of each row, `backward` writes dL/ds of a band of rows.

Both take the functions of the statistics as ordinary tuples (`functions.py`). A tuple annotated `tl.constexpr` would
leave the functions' source out of the cache key. Neither kernel uses atomics, so every run gives the same bits.

Names: A anchors (rows), C candidates (columns). `own` are the rows of a program, `other` the columns of a tile. `sides`
are x (A, width), y (C, width) and a scale of each row of both, or None.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

# The running maximum of a row without entries: finite, so that the difference of two is a number.
LOWEST = tl.constexpr(-1e30)
# How a statistic uses e: not at all, as e^{scale s}, or as e^{scale s - running maximum}.
NO_EXP, PLAIN_EXP, RUNNING_EXP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# The interpreter cannot multiply bf16. In float32 the product is the same.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
END = tl.constexpr(2147483647)

# Sizes and numbers that must not trigger a new compilation.
SIZES = ["A", "C", "listed", "steps", "chunk", "start", "end", "stride"]


@dataclass(frozen=True)
class Program:
    """What a kernel is compiled for."""

    rows: int  # of a tile
    columns: int  # of a tile
    piece: int  # columns of the embeddings that are multiplied at a time
    width: int  # of the embeddings
    few: int  # number of excluded columns of a row that are compared one by one, or -1 to search a list
    precision: str  # of products
    exponents: tuple[int, ...]  # NO_EXP, PLAIN_EXP or RUNNING_EXP of each statistic
    signs: tuple[float, ...] = ()  # 1 or -1 of each extreme, for the largest and the smallest
    symmetric: bool = False  # `backward` adds dL/ds_ji


@triton.jit
def load_rows(x, rows, size, first, P: tl.constexpr):
    """Load the columns of one piece of some rows of x (size, width), with 0 outside."""
    columns = first + tl.arange(0, P.piece)
    inside = (rows < size)[:, None] & (columns < P.width)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * P.width + columns[None, :], mask=inside, other=0.0)


@triton.jit
def product(a, b, total, P: tl.constexpr):
    """Return total + a b^T, accumulated in float32."""
    if INTERPRETED:
        total = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), total, input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(b), total, input_precision=P.precision)
    return total


@triton.jit
def similarities(sides, a, own, other, A, C, P: tl.constexpr):
    """Return s of a tile, one piece of the embeddings at a time. `a` holds the first piece of the own rows."""
    x, y, x_scale, y_scale = sides
    s = tl.full((P.rows, P.columns), 0.0, tl.float32)
    s = product(a, load_rows(y, other, C, 0, P), s, P)
    for first in range(P.piece, P.width, P.piece):
        s = product(load_rows(x, own, A, first, P), load_rows(y, other, C, first, P), s, P)
    if x_scale is not None:
        s = s * tl.load(x_scale + own, mask=own < A, other=0.0)[:, None]
        s = s * tl.load(y_scale + other, mask=other < C, other=0.0)[None, :]
    return s


@triton.jit
def excluded(lists, own, other, first, A, listed, steps, P: tl.constexpr):
    """Return a mask of the entries of a tile that a row's ascending list (A, listed) names."""
    FEW: tl.constexpr = P.few
    start = own.to(tl.int64) * listed
    found = tl.full((P.rows, P.columns), 0, tl.int1)
    if FEW > 0:
        # A few entries are compared one by one: an inner loop would keep Triton from prefetching tiles.
        near = tl.full((P.rows,), 0, tl.int32)
        for number in tl.static_range(FEW):
            value = tl.load(lists + start + number, mask=own < A, other=-1)
            near = near | ((value >= first) & (value < first + P.columns)).to(tl.int32)
        if tl.max(near, 0) > 0:
            for number in tl.static_range(FEW):
                value = tl.load(lists + start + number, mask=own < A, other=-1)
                found = found | (value[:, None] == other[None, :])
    else:
        # Binary search for the first entry that is not left of the tile.
        low = tl.zeros_like(own)
        high = low + listed
        for _ in range(steps):
            middle = (low + high) // 2
            value = tl.load(lists + start + middle, mask=(own < A) & (middle < listed), other=END)
            low = tl.where(value < first, middle + 1, low)
            high = tl.where(value < first, high, middle)
        value = tl.load(lists + start + low, mask=(own < A) & (low < listed), other=END)
        while tl.min(value, 0) < first + P.columns:
            found = found | (value[:, None] == other[None, :])
            low += 1
            value = tl.load(lists + start + low, mask=(own < A) & (low < listed), other=END)
    return found


@triton.jit(do_not_specialize=SIZES)
def forward(
    sides, lists, listed, steps, A, C, chunk, stride, numbers, shifts, sums, best, where, VALUES, P: tl.constexpr
):
    """Sum the statistics of the rows of a tile over one chunk of the columns, and find the extremes.

    Program (i, j) owns the i-th tile of rows and visits columns j chunk .. (j + 1) chunk. It writes row j of each
    output (splits, stride).

    Args:
        lists: (A, listed) excluded columns, ascending.
        numbers: a tuple for each statistic.
        shifts: a pointer for each statistic.
        sums: for each statistic, a pointer for each of its sums.
        best: a pointer for each extreme.
        where: a pointer for each extreme.
        VALUES: the value function of each statistic.
    """
    own = tl.program_id(0) * P.rows + tl.arange(0, P.rows)
    split = tl.program_id(1)
    a = load_rows(sides[0], own, A, 0, P)
    tops = ()
    totals = ()
    for i in tl.static_range(len(VALUES)):
        tops = tops + (tl.full((P.rows,), LOWEST if P.exponents[i] == RUNNING_EXP else 0.0, tl.float32),)
        parts = ()
        for _j in tl.static_range(len(sums[i])):
            parts = parts + (tl.full((P.rows,), 0.0, tl.float32),)
        totals = totals + (parts,)
    bests = ()
    places = ()
    for _i in tl.static_range(len(P.signs)):
        bests = bests + (tl.full((P.rows,), -float("inf"), tl.float32),)
        places = places + (tl.full((P.rows,), -1, tl.int32),)
    for first in range(split * chunk, tl.minimum(C, (split + 1) * chunk), P.columns):
        other = first + tl.arange(0, P.columns)
        s = similarities(sides, a, own, other, A, C, P)
        allowed = (other < C)[None, :]
        if P.few != 0:
            allowed = allowed & (excluded(lists, own, other, first, A, listed, steps, P) == 0)
        new_tops = ()
        new_totals = ()
        for i in tl.static_range(len(VALUES)):
            top, e, shrink = tops[i], s, 1.0
            if P.exponents[i] == PLAIN_EXP:
                e = tl.exp(numbers[i][0] * s)
            if P.exponents[i] == RUNNING_EXP:
                exponent = tl.where(allowed, numbers[i][0] * s, -float("inf"))
                top = tl.maximum(top, tl.max(exponent, 1))
                shrink = tl.exp(tops[i] - top)
                e = tl.exp(exponent - top[:, None])
            values = VALUES[i](s, e, numbers[i])
            parts = ()
            for j in tl.static_range(len(sums[i])):
                parts = parts + (totals[i][j] * shrink + tl.sum(tl.where(allowed, values[j], 0.0), 1),)
            new_tops = new_tops + (top,)
            new_totals = new_totals + (parts,)
        tops = new_tops
        totals = new_totals
        new_bests = ()
        new_places = ()
        for i in tl.static_range(len(P.signs)):
            seen = tl.where(allowed, P.signs[i] * s, -float("inf"))
            top = tl.max(seen, 1)
            place = first + tl.argmax(seen, 1)
            new_places = new_places + (tl.where(top > bests[i], place, places[i]),)
            new_bests = new_bests + (tl.maximum(top, bests[i]),)
        bests = new_bests
        places = new_places
    to = split.to(tl.int64) * stride + own
    for i in tl.static_range(len(VALUES)):
        tl.store(shifts[i] + to, tops[i], mask=own < A)
        for j in tl.static_range(len(sums[i])):
            tl.store(sums[i][j] + to, totals[i][j], mask=own < A)
    for i in tl.static_range(len(P.signs)):
        tl.store(best[i] + to, bests[i], mask=own < A)
        tl.store(where[i] + to, places[i], mask=own < A)


@triton.jit(do_not_specialize=SIZES)
def backward(
    sides, lists, listed, steps, A, C, start, end, stride, numbers, shifts, grads, out, SLOPES, P: tl.constexpr
):
    """Write dL/ds of the rows start .. end, or dL/ds_ij + dL/ds_ji if symmetric, to `out` (end - start, stride).

    Args:
        shifts: (A,) for each statistic, as `forward` gave them.
        grads: for each statistic, a pointer to the gradient (A,) of each of its sums.
        SLOPES: the slope function of each statistic.
    """
    own = start + tl.program_id(0) * P.rows + tl.arange(0, P.rows)
    first = tl.program_id(1) * P.columns
    other = first + tl.arange(0, P.columns)
    a = load_rows(sides[0], own, A, 0, P)
    s = similarities(sides, a, own, other, A, C, P)
    total = tl.full((P.rows, P.columns), 0.0, tl.float32)
    for i in tl.static_range(len(SLOPES)):
        e = s
        if P.exponents[i] == PLAIN_EXP:
            e = tl.exp(numbers[i][0] * s)
        if P.exponents[i] == RUNNING_EXP:
            e = tl.exp(numbers[i][0] * s - tl.load(shifts[i] + own, mask=own < A, other=0.0)[:, None])
        slopes = SLOPES[i](s, e, numbers[i])
        for j in tl.static_range(len(grads[i])):
            total += tl.load(grads[i][j] + own, mask=own < A, other=0.0)[:, None] * slopes[j]
        if P.symmetric:
            if P.exponents[i] == RUNNING_EXP:
                e = tl.exp(numbers[i][0] * s - tl.load(shifts[i] + other, mask=other < C, other=0.0)[None, :])
                slopes = SLOPES[i](s, e, numbers[i])
            for j in tl.static_range(len(grads[i])):
                total += tl.load(grads[i][j] + other, mask=other < C, other=0.0)[None, :] * slopes[j]
    if P.few != 0:
        total = tl.where(excluded(lists, own, other, first, A, listed, steps, P), 0.0, total)
    to = (own - start).to(tl.int64)[:, None] * stride + other[None, :]
    tl.store(out + to, total, mask=(own < end)[:, None] & (other < C)[None, :])
