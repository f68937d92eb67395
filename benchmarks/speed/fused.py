"""What the fused kernels compute and move, from their design: one visit of the tiles forward, one or two backward.

The gradient of embeddings wider than WIDEST is a product of matrices: dL/ds is written out, a band at a time.

The numbers of `core/objectives/kernels/launch.py` are written out here, so that the model needs no Triton:
`tests/benchmarks/test_gpu.py` holds them equal where it is installed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dipole.benchmarks.speed.work import Precision, Step, Work

# Rows that a program owns, in half precision and else: of the first blocks that `launch` lists.
FORWARD = {True: 64, False: 32}
BANDED = {True: 64, False: 32}
BACKWARD = {True: 64, False: 32}
# Sides of the square tiles of which half a symmetric matrix is made.
SQUARE = {True: 64, False: 32}
# More numbers than these are not kept for both sides of a tile: such a set visits the whole matrix.
MOST_SUMS = 6
# The gradient of rows up to this width stays in registers; bytes of a band that is held of a matrix of wider ones.
WIDEST, BAND = 128, 1 << 28
# Rows of the visited side that a run of a program has at least.
SHORTEST = 1024
# Programs at a time on a multiprocessor.
PROGRAMS = 2
# What is smaller stays in the second-level cache from one wave of programs to the next: 40 MB on an A100.
CACHE = 40e6


@dataclass(frozen=True)
class Summand:
    """A statistic with sums: how many, the scale of its exponential, if any, and whether a maximum runs along."""

    parts: int
    scale: float | None = None
    running: bool = False


@dataclass(frozen=True)
class Matrix:
    """A sweep of fused kernels.

    Args:
        anchors: A.
        candidates: C.
        width: d.
        half: embeddings in bf16 or float16; else float32.
        symmetric: anchors are candidates.
        listed: E, columns that take no part in each row.
        extremes: indices that are asked for.
        multiprocessors: of the device, which decide into how many runs a row of tiles is cut.
        tf32: float32 products may be rounded to TF32.
    """

    anchors: int
    candidates: int
    width: int
    half: bool
    symmetric: bool
    listed: int = 2
    extremes: int = 0
    multiprocessors: int = 132
    tf32: bool = False

    @property
    def size(self) -> int:
        """Bytes of a number of the embeddings."""
        return 2 if self.half else 4

    @property
    def precision(self) -> Precision:
        return "bf16" if self.half else "tf32" if self.tf32 else "float32"

    @property
    def at_once(self) -> int:
        return PROGRAMS * self.multiprocessors


def fused(matrix: Matrix, summands: Sequence[Summand]) -> Work:
    """The work of a sweep, forward and backward, of both anchors and candidates."""
    return prepared(matrix) + forward(matrix, summands) + backward(matrix, summands)


def prepared(matrix: Matrix) -> Work:
    """Lists sorted and narrowed; of half-precision embeddings the factors from them to the rows of the matrix."""
    listed = matrix.anchors * matrix.listed
    work = Counter([Step(bytes=listed * (8 + 2 * 8)), Step(bytes=listed * (8 + 4))])
    if matrix.half:
        for rows in [matrix.anchors] if matrix.symmetric else [matrix.anchors, matrix.candidates]:
            # Two lengths, one compared, one chosen against an infinity, the quotient.
            work += Counter([Step(bytes=rows * matrix.width * size) for size in (2, 4)])
            work += Counter([Step(bytes=rows * each) for each in (5, 9, 12)] + [Step(bytes=4)])
    return work


def forward(matrix: Matrix, summands: Sequence[Summand]) -> Work:
    """Every tile once, or those to the right of the diagonal."""
    parts = sum(each.parts for each in summands)
    if matrix.symmetric and parts + 2 * matrix.extremes <= MOST_SUMS:
        return _half(matrix, summands, parts)
    splits = _splits(matrix, matrix.anchors, matrix.candidates)
    programs = -(-matrix.anchors // FORWARD[matrix.half]) * splits
    return _shares(matrix, summands, parts, splits, first=True) + Counter(
        [_visited(matrix, summands, matrix.anchors * matrix.candidates, programs, splits, parts)]
    )


def _half(matrix: Matrix, summands: Sequence[Summand], parts: int) -> Work:
    side = SQUARE[matrix.half]
    blocks = -(-matrix.anchors // side)
    tiles = blocks // 2 + 1
    kept = parts + len(summands) + 2 * matrix.extremes if summands else 2 * matrix.extremes
    most = max(8, 2 * matrix.width // max(1, kept))
    work: Work = Counter()
    for start in range(0, tiles, most):
        run = min(most, tiles - start)
        splits = max(1, min(matrix.at_once // blocks, run // 4))
        splits = -(-run // -(-run // splits))
        entries = blocks * run * side * side
        work += _shares(matrix, summands, parts, splits + run, first=start == 0)
        work[_visited(matrix, summands, entries, blocks * splits, splits + run, parts)] += 1
    return work


def _visited(matrix: Matrix, summands: Sequence[Summand], entries: int, programs: int, slots: int, parts: int) -> Step:
    """A launch of the forward kernel."""
    exponents = {(each.scale, each.running) for each in summands if each.scale is not None}
    return Step(
        flops=2 * matrix.width * entries,
        bytes=_read(matrix, matrix.anchors, matrix.candidates, programs) + slots * _share(matrix, len(summands), parts),
        exponentials=len(exponents) * entries,
        precision=matrix.precision,
    )


def _share(matrix: Matrix, shifts: int, parts: int) -> int:
    """Bytes of a slot: sums, shifts, and the value and place of extremes."""
    return 4 * matrix.anchors * (parts + shifts + 2 * matrix.extremes)


def _shares(matrix: Matrix, summands: Sequence[Summand], parts: int, slots: int, first: bool) -> Work:
    """Slots laid out before a launch and added up after it; those of a later launch beside what came before."""
    row = 4 * matrix.anchors
    shifts, running = len(summands), sum(each.running for each in summands)
    work: Work = Counter()
    for numbers in (parts, shifts, matrix.extremes, matrix.extremes):
        if numbers:
            work[Step(bytes=slots * numbers * row)] += 1  # filled
    if running:
        work[Step(bytes=slots * row)] += running
    held = slots
    if not first:
        held += 1
        for numbers in (parts, shifts, matrix.extremes, matrix.extremes):
            if numbers:
                work[Step(bytes=2 * held * numbers * row)] += 1  # one after the other
    if held == 1:
        return work
    work[Step(bytes=4)] += 2  # numbers that stand for no place
    if summands:
        work[Step(bytes=held * shifts * row)] += 1  # the largest shift
        work[Step(bytes=2 * held * shifts * row)] += 1  # what each lies below it
        work[Step(bytes=2 * held * shifts * row, exponentials=held * shifts * matrix.anchors)] += 1
        work[Step(bytes=2 * held * parts * row)] += 1  # weights, one for each sum
        work[Step(bytes=3 * held * parts * row)] += 1  # weighed
        work[Step(bytes=held * parts * row)] += 1  # added
    if matrix.extremes:
        # The best, where it is, what is as good, its place; two comparisons and a choice.
        work[Step(bytes=2 * held * matrix.extremes * row)] += 5
        work[Step(bytes=2 * matrix.extremes * row)] += 2
    return work


def backward(matrix: Matrix, summands: Sequence[Summand]) -> Work:
    """Every tile formed again, once for both directions of a symmetric matrix, else once for each side."""
    if not summands:
        return Counter()
    if matrix.width > WIDEST:
        return _banded(matrix, summands)
    if matrix.symmetric:
        return _gradient(matrix, summands, matrix.anchors, matrix.candidates, sides=2)
    work = _gradient(matrix, summands, matrix.anchors, matrix.candidates, sides=1)
    return work + _gradient(matrix, summands, matrix.candidates, matrix.anchors, sides=1)


def _gradient(matrix: Matrix, summands: Sequence[Summand], own: int, other: int, sides: int) -> Work:
    width, entries = matrix.width, own * other
    splits = _splits(matrix, own, other)
    programs = -(-own // BACKWARD[matrix.half]) * splits
    written = 4 * splits * own * width
    work = Counter(
        [
            Step(bytes=written),  # zeros
            Step(bytes=4 * len(summands) * matrix.anchors),  # the gradient of the shifts, which is none
            Step(
                flops=2 * 2 * width * entries,
                bytes=_read(matrix, own, other, programs) + _given(summands, own + other) + written,
                exponentials=_exponentials(summands, sides) * entries,
                precision=matrix.precision,
            ),
        ]
    )
    if splits > 1:
        work[Step(bytes=written + written // splits)] += 1  # added
    return work


def _banded(matrix: Matrix, summands: Sequence[Summand]) -> Work:
    """Every tile formed once and written out; then a product for the anchors, and one for candidates of their own."""
    width, columns = matrix.width, matrix.candidates
    most = max(256, BAND // (columns * matrix.size) // 256 * 256)
    sides = 2 if matrix.symmetric else 1
    work = Counter([Step(bytes=4 * len(summands) * matrix.anchors)])  # the gradient of the shifts, which is none
    if matrix.half:
        for rows in [matrix.anchors] if matrix.symmetric else [matrix.anchors, columns]:
            work[Step(bytes=6 * rows * width)] += 1  # the rows of unit length in bf16
    if not matrix.symmetric:
        work[Step(bytes=4 * columns * width)] += 1  # zeros
    for start in range(0, matrix.anchors, most):
        rows = min(most, matrix.anchors - start)
        entries = rows * columns
        programs = -(-rows // BANDED[matrix.half]) * _splits(matrix, rows, columns)
        formed = Step(
            flops=2 * width * entries,
            bytes=_read(matrix, rows, columns, programs) + _given(summands, rows + columns) + matrix.size * entries,
            exponentials=_exponentials(summands, sides) * entries,
            precision=matrix.precision,
        )
        product = Step(
            flops=2 * width * entries,
            bytes=matrix.size * (entries + columns * width) + 4 * rows * width,
            precision=matrix.precision,
        )
        work += Counter([formed, product, Step(bytes=8 * rows * width)])  # and to its place
        if not matrix.symmetric:
            turned = matrix.size * (entries + rows * width) + 4 * columns * width
            work[Step(flops=2 * width * entries, bytes=turned, precision=matrix.precision)] += 1
            work[Step(bytes=12 * columns * width)] += 1  # added
    return work


def _given(summands: Sequence[Summand], rows: int) -> int:
    """Bytes of the gradients of the sums, and of the shifts, of some rows."""
    return 4 * sum(each.parts + each.running for each in summands) * rows


def _exponentials(summands: Sequence[Summand], sides: int) -> int:
    """Exponentials of an entry in the backward pass; those that subtract no maximum serve both its sides."""
    plain = {each.scale for each in summands if each.scale is not None and not each.running}
    return len(plain) + sides * sum(each.running for each in summands)


def _splits(matrix: Matrix, own: int, other: int) -> int:
    """Into how many runs the visited side is cut."""
    wanted = matrix.at_once // -(-own // 128)
    splits = max(1, min(wanted, other // SHORTEST))
    chunk = max(128, -(-other // (splits * 128)) * 128)
    return max(1, -(-other // chunk))


def _read(matrix: Matrix, own: int, other: int, programs: int) -> float:
    """Bytes of embeddings that come from memory: one side once, the other with each wave of programs.

    Programs of a wave visit the same rows at about the same time; a side that fits the cache stays there.
    """
    row = matrix.width * matrix.size + (4 if matrix.half else 0)
    waves = -(-programs // matrix.at_once) if other * row > CACHE else 1
    return row * (own + waves * other)
