"""Launch the kernels for one matrix, forward and backward, and compare them with float64 before they are used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from dipole.core.objectives.indices import mask_of
from dipole.core.objectives.kernels import template
from dipole.core.objectives.kernels.functions import functions_of
from dipole.core.objectives.similarity import Factors
from dipole.core.objectives.statistics import AnyStatistic, Statistic, part_count
from dipole.core.objectives.tiles import MatrixPass, row_sums

HALF = (torch.bfloat16, torch.float16)
# Lists of up to this many excluded columns are compared entry by entry.
FEW = 8
# Columns that a program of the forward pass visits at least, if the columns are split to occupy the device.
SHORTEST = 1024
# Bytes of the band of dL/ds that the backward pass writes and multiplies at a time.
BAND = 1 << 28


@dataclass(frozen=True)
class ProgramShape:
    """The shape of a program."""

    rows: int  # of the matrix
    columns: int  # of the matrix, at a time
    width: int  # of the embeddings, at a time
    warps: int
    stages: int  # of the pipeline
    whole: int = 0  # embeddings up to this width are loaded at once


# The fastest on an H200 of those that fit into the shared memory of every GPU since sm_80. Elsewhere than on Hopper the
# forward block would use more registers than there are, and so would more than two statistics in float32.
HOPPER_FORWARD = ProgramShape(64, 128, 64, 4, 3)
HALF_FORWARD = ProgramShape(64, 64, 64, 4, 3)
HALF_BACKWARD = ProgramShape(64, 64, 64, 8, 3, whole=128)
FLOAT = ProgramShape(64, 64, 32, 4, 3)
FLOAT_OF_MANY = ProgramShape(64, 32, 32, 4, 3)
INTERPRETED = ProgramShape(32, 32, 32, 4, 1)
# float32 as three TF32 products, which are as accurate and three times as fast as float32 without tensor cores.
EXACT = "tf32x3"


@dataclass(frozen=True)
class Operand:
    """One side of the matrix as the kernels read it: s_ij = x.scale_i y.scale_j (x_i . y_j)."""

    values: Tensor  # (n, d), contiguous. In half precision the encoder's output, not its normalised rows
    scale: Tensor | None = None  # (n,) in float32, or None for 1

    @classmethod
    def of(cls, rows: Tensor, raw: Tensor | None) -> Self:
        """Return the operand of some rows, which are multiples of the raw ones, if there are any."""
        rows = rows.detach()
        if raw is None:
            return cls(rows.contiguous())
        raw = raw.detach()
        length = torch.linalg.vector_norm(raw, dim=1, dtype=torch.float32)
        scale = torch.linalg.vector_norm(rows, dim=1) / torch.where(length > 0, length, torch.inf)
        return cls(raw.contiguous(), scale)


def numbers_of(statistic: Statistic) -> tuple[float, ...]:
    """Return the argument `numbers` of kernel functions: the scale, if there is one, then the other fields in order."""
    numbers = {each.name: float(getattr(statistic, each.name)) for each in fields(statistic)}  # type: ignore[arg-type]
    if statistic.scale is None:
        return tuple(numbers.values())
    numbers.pop("scale", None)
    return float(statistic.scale), *numbers.values()


@dataclass(frozen=True)
class Launcher:
    """Launches the kernels for one problem."""

    problem: MatrixPass
    x: Operand
    y: Operand
    lists: Tensor  # (A, E) the excluded columns of each row, ascending

    @classmethod
    def of(cls, problem: MatrixPass) -> Self:
        """Return the launcher of a problem with rows in float32."""
        factors = problem.factors
        raw: tuple[Tensor | None, Tensor | None] = None, None
        if factors.embeddings is not None and _half(problem):
            raw = factors.embeddings
        x = y = Operand.of(factors.x, raw[0])
        if factors.y is not factors.x:
            y = Operand.of(factors.y, raw[1])
        return cls(problem, x, y, problem.excluded.sort(1).values.to(torch.int32))

    def sums(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the sums (N, A), the shifts (S, A) and the indices (A,)."""
        anchors = len(self.x.values)
        splits, chunk = self._splits()
        shape = self._shape(forward=True)
        counts = [part_count(each) for each in self.problem.statistics]
        stride, device = _aligned(anchors), self.x.values.device
        sums = torch.empty(sum(counts), splits, stride, device=device)
        shifts = torch.empty(len(counts), splits, stride, device=device)
        best = torch.empty(len(self.problem.extremes), splits, stride, device=device)
        where = torch.empty_like(best, dtype=torch.int32)
        self._launch(
            template.forward,
            shape,
            (triton.cdiv(anchors, shape.rows), splits),
            chunk=chunk,
            stride=stride,
            shifts=shifts.unbind(),
            sums=_nested(sums, counts),
            best=best.unbind(),
            where=where.unbind(),
            VALUES=tuple(functions_of(each)[0] for each in self.problem.statistics),
            P=self._program(shape, signs=tuple(float(each.sign) for each in self.problem.extremes)),
        )
        return _merge(sums[..., :anchors], shifts[..., :anchors], best[..., :anchors], where[..., :anchors], counts)

    def gradients(
        self, x: Tensor, y: Tensor, grad: Tensor, shifts: Tensor, candidates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients as `Tiling.gradients` does.

        The kernel writes dL/ds of a band of rows, and two matrix products give the gradients. If the matrix is
        symmetric, the first gradient is that of both sides.
        """
        anchors, columns = len(x), len(y)
        shape = self._shape(forward=False)
        dtype = torch.bfloat16 if self.half else torch.float32
        most = max(256, BAND // (columns * dtype.itemsize) // 256 * 256)
        if interpreted():
            most = INTERPRETED.rows
        stride = triton.cdiv(columns, 16) * 16  # rows that begin at 32 bytes are read as whole vectors
        padding = (0, _aligned(anchors) - anchors)
        grad, shifts = pad(grad, padding).contiguous(), pad(shifts, padding).contiguous()
        band = torch.empty(min(most, anchors), stride, dtype=dtype, device=x.device)
        dx, dy = torch.empty_like(x), torch.zeros_like(y) if candidates else None
        left = x.to(dtype)
        right = left if y is x else y.to(dtype)
        counts = [part_count(each) for each in self.problem.statistics]
        for start in range(0, anchors, most):
            end = min(start + most, anchors)
            self._launch(
                template.backward,
                shape,
                (triton.cdiv(end - start, shape.rows), triton.cdiv(columns, shape.columns)),
                start=start,
                end=end,
                stride=stride,
                shifts=shifts.unbind(),
                grads=_nested(grad, counts),
                out=band,
                SLOPES=tuple(functions_of(each)[1] for each in self.problem.statistics),
                P=self._program(shape, symmetric=self.problem.symmetric),
            )
            slopes = band[: end - start, :columns]
            dx[start:end] = _multiply(slopes, right)
            if dy is not None:
                dy += _multiply(slopes.T, left[start:end])
        return dx, dy

    @property
    def half(self) -> bool:
        return self.x.values.dtype in HALF

    def _shape(self, forward: bool) -> ProgramShape:
        if interpreted():
            return INTERPRETED
        few = len(self.problem.statistics) + len(self.problem.extremes) <= 2
        if not self.half and few:
            return FLOAT
        if not self.half:
            return FLOAT_OF_MANY
        if not forward:
            return HALF_BACKWARD
        if few and _generation(self.x.values) == 9:
            return HOPPER_FORWARD
        return HALF_FORWARD

    def _splits(self) -> tuple[int, int]:
        """Return the number of column runs and the columns of each. More runs help to occupy the device."""
        anchors, columns = len(self.x.values), len(self.y.values)
        shortest, step, programs = (64, 32, 4) if interpreted() else (SHORTEST, 128, 2 * _processors(self.x.values))
        splits = max(1, min(programs // triton.cdiv(anchors, step), columns // shortest))
        chunk = max(step, triton.cdiv(columns, splits * step) * step)
        return max(1, triton.cdiv(columns, chunk)), chunk

    def _program(self, shape: ProgramShape, **more: Any) -> template.Program:
        width, listed = self.x.values.shape[1], self.lists.shape[1]
        exponents = []
        for statistic, running in zip(self.problem.statistics, self.problem.running, strict=True):
            kind = template.NO_EXP
            if running:
                kind = template.RUNNING_EXP
            elif statistic.scale is not None:
                kind = template.PLAIN_EXP
            exponents.append(kind.value)
        piece = shape.whole if width <= shape.whole else shape.width
        return template.Program(
            shape.rows,
            shape.columns,
            min(piece, max(16, triton.next_power_of_2(width))),
            width,
            few=listed if listed <= FEW else -1,
            precision="tf32" if tf32_allowed() else EXACT,
            exponents=tuple(exponents),
            **more,
        )

    def _launch(self, kernel: Any, shape: ProgramShape, grid: tuple[int, int], **arguments: Any) -> None:
        listed = self.lists.shape[1]
        with torch.cuda.device_of(self.x.values):  # Triton launches on the current device, which may be another
            kernel[grid](
                sides=(self.x.values, self.y.values, self.x.scale, self.y.scale),
                lists=self.lists,
                listed=listed,
                steps=listed.bit_length(),
                A=len(self.x.values),
                C=len(self.y.values),
                numbers=tuple(numbers_of(each) for each in self.problem.statistics),
                **arguments,
                num_warps=shape.warps,
                num_stages=shape.stages,
            )


def _aligned(rows: int) -> int:
    """Round up, so that each vector of a tensor (N, rows) begins at 16 bytes: other addresses need another kernel."""
    return -(-rows // 4) * 4


def _nested(rows: Tensor, counts: Sequence[int]) -> tuple[tuple[Tensor, ...], ...]:
    """Return the rows of a tensor (N, ...), grouped by statistic."""
    if counts:
        return tuple(group.unbind() for group in rows.split(list(counts)))
    return ()


def _merge(
    sums: Tensor, shifts: Tensor, best: Tensor, where: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Merge the partial results (..., splits, A) of the runs of columns, in their order."""
    if sums.shape[1] == 1:
        return sums[:, 0], shifts[:, 0], list(where[:, 0].long())
    shift = shifts.amax(1)
    weights = (shifts - shift.unsqueeze(1)).exp()
    each = [weights[i] for i, count in enumerate(counts) for _ in range(count)]
    total = (sums * torch.stack(each)).sum(1) if each else sums[:, 0]
    # Of equal extremes the first wins. A run without entries has the place -1.
    top = best.amax(1)
    last = torch.iinfo(where.dtype).max
    place = torch.where((best == top.unsqueeze(1)) & (where >= 0), where, last).amin(1)
    return total, shift, list(torch.where(top > -torch.inf, place, -1).long())


def _multiply(slopes: Tensor, rows: Tensor) -> Tensor:
    """Return the product of two matrices, accumulated and returned in float32."""
    if slopes.dtype == torch.float32:
        return slopes @ rows
    if slopes.is_cuda:
        return torch.mm(slopes, rows, out_dtype=torch.float32)
    return slopes.float() @ rows.float()


def _processors(x: Tensor) -> int:
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def _generation(x: Tensor) -> int:
    return torch.cuda.get_device_capability(x.device)[0]


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def tf32_allowed() -> bool:
    """Return whether PyTorch may round float32 products to TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")  # the older switches set it too


ROWS, COLUMNS = 20, 36
# Every row is +-STEP in the same odd number of columns. So no similarity is 0 or another point where a slope may jump.
NONZERO, STEP = 15, 0.2426
TOLERANCE, HALF_TOLERANCE = 1e-3, 2e-2


def key_of(problem: MatrixPass) -> tuple[object, ...]:
    """Return the key of a compiled kernel. Numbers such as a temperature are not part of it."""
    kinds = tuple(type(each) for each in problem.statistics), problem.running, problem.extremes, problem.symmetric
    x = problem.factors.x
    return *kinds, x.device, x.shape[1], _half(problem), _listed(problem), tf32_allowed(), interpreted()


def _half(problem: MatrixPass) -> torch.dtype | None:
    embeddings = problem.factors.embeddings
    if embeddings is None or not all(each.dtype in HALF for each in embeddings):
        return None
    return embeddings[0].dtype


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
    device, half = problem.factors.x.device, _half(problem)
    sizes = (ROWS,) if problem.symmetric else (ROWS, COLUMNS)
    sides = [_rows(size, problem.factors.x.shape[1], source) for size in sizes]
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
    small = replace(problem, factors=Factors(given[0], given[-1], None, raw), excluded=lists.to(device))
    with torch.enable_grad():
        found = [each.cpu().double() for each in row_sums(Launcher.of(small))]
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
