"""What every kernel shares: a tile of products, the entries that take no part, and functions Triton lacks."""

import triton
import triton.language as tl

# The interpreter keeps bf16 as bare bits, which its product does not know; in float32 the product is the same.
WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """a b + total, accumulated in float32."""
    if WIDEN:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def load_rows(x, rows, size, first, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns first .. first + WIDTH of some rows of x (size, D); 0 outside."""
    columns = first + tl.arange(0, WIDTH)
    inside = (rows < size)[:, None] & (columns < D)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def products(
    x,
    y,
    own,
    other,
    own_size,
    other_size,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x_own . y_other (BM, BN), BK columns at a time."""
    s = tl.zeros((BM, BN), tl.float32)
    for first in range(0, D, BK):
        a = load_rows(x, own, own_size, first, D, BK)
        b = load_rows(y, other, other_size, first, D, BK)
        s = product(a, tl.trans(b), s, PRECISION)
    return s


@triton.jit
def listed(
    lists,
    rows,
    columns,
    first,
    size,
    width,
    steps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """True where a row's ascending list (size, width) holds a column of first .. first + COLUMNS.

    (ROWS, COLUMNS), or turned unless ROWS_FIRST. Lists without such a column cost their binary search alone.
    """
    start = rows.to(tl.int64) * width
    low = tl.zeros_like(rows)
    high = low + width
    for _ in range(steps):
        middle = (low + high) // 2
        value = tl.load(lists + start + middle, mask=(rows < size) & (middle < width), other=2147483647)
        low = tl.where(value < first, middle + 1, low)
        high = tl.where(value < first, high, middle)
    value = tl.load(lists + start + low, mask=(rows < size) & (low < width), other=2147483647)
    if ROWS_FIRST:
        found = tl.zeros((ROWS, COLUMNS), tl.int1)
    else:
        found = tl.zeros((COLUMNS, ROWS), tl.int1)
    while tl.min(value, 0) < first + COLUMNS:
        if ROWS_FIRST:
            found = found | (value[:, None] == columns[None, :])
        else:
            found = found | (value[None, :] == columns[:, None])
        low += 1
        value = tl.load(lists + start + low, mask=(rows < size) & (low < width), other=2147483647)
    return found


@triton.jit
def listed_few(
    lists,
    rows,
    columns,
    first,
    size,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):
    """The same of lists of a few entries, without an inner loop, which would keep Triton from prefetching tiles."""
    start = rows.to(tl.int64) * WIDTH
    near = tl.zeros((ROWS,), tl.int32)
    for number in tl.static_range(WIDTH):
        value = tl.load(lists + start + number, mask=rows < size, other=-1)
        near = near | ((value >= first) & (value < first + COLUMNS)).to(tl.int32)
    if ROWS_FIRST:
        found = tl.zeros((ROWS, COLUMNS), tl.int1)
    else:
        found = tl.zeros((COLUMNS, ROWS), tl.int1)
    if tl.max(near, 0) > 0:
        for number in tl.static_range(WIDTH):
            value = tl.load(lists + start + number, mask=rows < size, other=-1)
            if ROWS_FIRST:
                found = found | (value[:, None] == columns[None, :])
            else:
                found = found | (value[None, :] == columns[:, None])
    return found


@triton.jit
def log1p(x):
    """log(1 + x), exact where x is small."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def expm1(x):
    """e^x - 1, exact where x is small."""
    y = tl.exp(x)
    near = (y == 1.0) | (y - 1.0 == -1.0) | (y > 1e30)
    kept = tl.where(near, 2.0, y)
    return tl.where(y == 1.0, x, tl.where(near, y - 1.0, (kept - 1.0) * (x / tl.log(kept))))


@triton.jit
def tanh(x):
    """The hyperbolic tangent."""
    z = expm1(-2.0 * tl.abs(x))
    y = -z / (2.0 + z)
    return tl.where(x < 0.0, -y, y)
