"""Kernels built and launched: one for the forward pass of a matrix, one or two for the backward pass."""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from dipole.core.objectives.kernels import device
from dipole.core.objectives.kernels.source import Side, Summand, backward, band, forward
from dipole.core.objectives.statistics import Extreme

# The running maximum of a row before its first entry: finite, so that the difference of two is a number.
LOWEST = -1e30
# Maxima of rows that lie closer share an exponential, which is still a normal number then.
NEAR = 70.0
COUNTS = ("own_size", "other_size", "width", "steps", "chunk", "start", "end", "own_kind", "other_kind")
HALF = (torch.bfloat16, torch.float16)
# Rows of the side that is visited that a program sees at least, where it is split to fill a device.
SHORTEST = 1024
# Lists up to this length are compared entry by entry where one of them meets a tile.
FEW = 8


@dataclass(frozen=True)
class Blocks:
    """The shape of a program: rows it owns, rows it visits at a time, columns of a product, warps, stages.

    `sums` is for how many numbers kept for each row it has registers.
    """

    own: int
    other: int
    columns: int
    warps: int
    stages: int
    sums: float = math.inf


# The first of each is taken untuned; benchmarks choose among them where tuning is allowed. None needs local memory for
# several sums of a row, but those that say for how many they are.
FORWARD = {
    True: (Blocks(64, 64, 64, 8, 3), Blocks(128, 64, 64, 8, 3), Blocks(128, 128, 64, 8, 3, 1)),
    False: (Blocks(32, 32, 32, 4, 2), Blocks(64, 64, 32, 8, 2)),
}
BACKWARD = {
    True: (Blocks(64, 32, 64, 8, 2), Blocks(64, 64, 64, 8, 2)),
    False: (Blocks(32, 32, 16, 8, 2),),
}
BANDED = {
    True: (Blocks(64, 64, 64, 8, 3, 2), Blocks(64, 32, 64, 8, 2), Blocks(128, 64, 64, 8, 3, 1)),
    False: (Blocks(32, 32, 32, 4, 2), Blocks(64, 64, 32, 8, 2, 2)),
}
# Half of a matrix is cut into square tiles, untuned. More sums than MOST_SUMS would not stay in registers for both
# sides of a tile; such a set visits the whole matrix.
SQUARE = {True: (Blocks(64, 64, 64, 8, 3),), False: (Blocks(32, 32, 16, 8, 2),)}
MOST_SUMS = 6
# Embeddings up to this width are held whole, wider ones are multiplied a piece at a time.
WHOLE = {True: 128, False: 32}
# The gradient of rows up to this width stays in registers. For wider ones dL/ds of a band of the matrix is written out,
# in bf16 or float32, and multiplied by the library: bytes of a band, of which the products still fill a device.
WIDEST, BAND = 128, 1 << 28
INTERPRETED = Blocks(32, 32, 32, 4, 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=64)
def built(text: str) -> Any:
    """The Triton function of a source text; its lines are where a debugger and Triton look for them."""
    name = f"<dipole kernel {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {
        "tl": triton.language,
        "LOWEST": triton.language.constexpr(LOWEST),
        "NEAR": triton.language.constexpr(NEAR),
        "__name__": f"{__name__}.generated",
    }
    for each in ("load_rows", "product", "products", "listed", "listed_few", "log1p", "expm1", "tanh"):
        namespace[each] = getattr(device, each)
    exec(compile(text, name, "exec"), namespace)
    function = namespace[text[len("def ") : text.index("(")]]
    numbers = [word for word in function.__code__.co_varnames[: function.__code__.co_argcount] if word[0] == "k"]
    return triton.jit(function, do_not_specialize=[*COUNTS, *numbers])


def _kind(rows: int) -> int:
    """Rows rounded up to a power of two: sizes of one kind share a choice of blocks."""
    return 1 << max(0, rows - 1).bit_length()


@lru_cache(maxsize=64)
def _tuned(text: str, blocks: tuple[Blocks, ...], width: int, whole: bool) -> Any:
    """The kernel that measures which blocks suit it, once for each kind of sizes; the choice is kept on disk."""
    configs = [
        triton.Config(shape(each, width, whole), num_warps=each.warps, num_stages=each.stages) for each in blocks
    ]
    key = ["own_kind", "other_kind", "D", "SCALED", "FEW", "PRECISION"]
    return triton.autotune(configs, key=key, cache_results=True)(built(text))


def shape(blocks: Blocks, width: int, whole: bool) -> dict[str, int]:
    return {"BM": blocks.own, "BN": blocks.other, "BK": max(16, _kind(width)) if whole else blocks.columns}


@dataclass(frozen=True)
class Factors:
    """One side of the similarities as the kernels read it: s_ij = x_scale_i y_scale_j (x_i . y_j).

    Args:
        values: (n, d), contiguous; in half precision what the encoder gave, not its normalised rows.
        scale: (n,) in float32; None for 1.
    """

    values: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class Sweep:
    """What the kernels need to know of a matrix and of what is asked of it.

    Args:
        x: factors of the anchors.
        y: factors of the candidates.
        lists: (A, E) candidates that take no part, ascending in each row, int32.
        symmetric: x is y, and exclusion is mutual.
        summands: statistics with a sum.
        extremes: statistics with an index.
        tune: choose blocks by measuring; otherwise the first are taken, so that every run adds up in one order.
        mutual: candidates are anchors of their own, j excludes i exactly if i excludes j, and the rows of both are
            served, those of y behind those of x.
    """

    x: Factors
    y: Factors
    lists: Tensor
    symmetric: bool
    summands: tuple[Summand, ...]
    extremes: tuple[Extreme, ...]
    tune: bool = False
    mutual: bool = False

    @property
    def half(self) -> bool:
        return self.x.values.dtype in HALF

    def sums(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Sums (N, A), their shifts (S, A), and indices (A,)."""
        total = self.totals()
        return total["sums"], total["shifts"], list(total["where"].long())

    def totals(self) -> dict[str, Tensor]:
        """The same, `sums`, `shifts` and `where` (X, A), with the extreme values, `best` (X, A)."""
        if self.mutual:
            few = self.kept <= MOST_SUMS
            one, other = self._pair() if few else (self._whole("rows"), self._whole("columns"))
            return {name: torch.cat([one[name], other[name]], 1) for name in one}
        return self._half() if self.halved else self._whole("rows")

    def _whole(self, side: Side) -> dict[str, Tensor]:
        """What is found of the rows of one side by a visit to the whole matrix."""
        own, other = (self.y, self.x) if side == "columns" else (self.x, self.y)
        text, numbers = forward(self.summands, self.extremes, side=side)
        splits, chunk = self._splits(len(own.values), len(other.values))
        found = self._slots(splits, len(own.values))
        self._launch(text, numbers, FORWARD, own, other, splits, {"chunk": chunk}, found)
        return _joined(self.summands, **found)

    def _half(self) -> dict[str, Tensor]:
        """What is found of the rows by a visit to half of the matrix."""
        text, numbers = forward(self.summands, self.extremes, "half")
        total: dict[str, Tensor] = {}
        for splits, slots, counts in self._circle():
            found = self._slots(slots, len(self.x.values))
            self._launch(text, numbers, FORWARD, self.x, self.y, splits, counts, found)
            total = self._added(total, found)
        return total

    def _pair(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is found of the rows of both sides by one visit to the matrix, some anchors at a time.

        The share of a block of anchors for the other side takes a slot: as many at a time as `_at_once` says.
        """
        rows, columns = len(self.x.values), len(self.y.values)
        text, numbers = forward(self.summands, self.extremes, "pair")
        side = (INTERPRETED if interpreted() else SQUARE[self.half][0]).own
        most = min(self._at_once, -(-rows // side)) * side
        splits, chunk = self._splits(most, columns)
        own = self._slots(splits, rows)  # each launch writes rows of its own
        total: dict[str, Tensor] = {}
        for start in range(0, rows, most):
            end = min(start + most, rows)
            other = self._slots(-(-(end - start) // side), columns)
            given = own | {f"{name}_other": value for name, value in other.items()}
            counts = {"chunk": chunk, "start": start, "end": end}
            self._launch(text, numbers, FORWARD, self.x, self.y, splits, counts, given)
            total = self._added(total, other)
        return _joined(self.summands, **own), total

    def _added(self, total: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
        """What was known of rows, and the shares of a launch, made one."""
        held = {name: torch.cat([total[name].unsqueeze(0), new]) for name, new in found.items()} if total else found
        return _joined(self.summands, **held)

    def _slots(self, count: int, rows: int) -> dict[str, Tensor]:
        """What a launch writes: `count` shares of every row's sums, shifts and extremes."""
        parts = self.summands[-1].stop if self.summands else 0
        new = partial(torch.full, device=self.x.values.device)
        shifts = new((count, len(self.summands), rows), 0.0)
        for number, each in enumerate(self.summands):
            if each.running:
                shifts[:, number] = LOWEST
        return {
            "sums": new((count, parts, rows), 0.0),
            "shifts": shifts,
            "best": new((count, len(self.extremes), rows), -torch.inf),
            "where": new((count, len(self.extremes), rows), -1, dtype=torch.int32),
        }

    def _circle(self) -> list[tuple[int, int, dict[str, int]]]:
        """Launches that visit half of the matrix: runs of a block's tiles, slots, and the counts they take.

        A tile's share for its other side takes a slot: as many at a time as `_at_once` says.
        """
        rows = len(self.x.values)
        side = (INTERPRETED if interpreted() else SQUARE[self.half][0]).own
        blocks = -(-rows // side)
        tiles = blocks // 2 + 1  # to the right of the diagonal, itself included
        at_once, launches = self._at_once, []
        for start in range(0, tiles, at_once):
            end = min(start + at_once, tiles)
            splits = max(1, min(self._processors // blocks, (end - start) // 4))
            chunk = -(-(end - start) // splits)
            splits = -(-(end - start) // chunk)
            launches.append((splits, splits + end - start, {"chunk": chunk, "start": start, "end": end}))
        return launches

    @property
    def _at_once(self) -> int:
        """Shares of rows that are held at a time: about as many as the embeddings themselves take memory."""
        parts = len(self.summands) and self.summands[-1].stop + len(self.summands)
        return max(8, 2 * self.x.values.shape[1] // max(1, parts + 2 * len(self.extremes)))

    @property
    def kept(self) -> int:
        """Numbers that a program keeps for each row."""
        return (self.summands[-1].stop if self.summands else 0) + 2 * len(self.extremes)

    @property
    def halved(self) -> bool:
        """Whether the forward pass visits half of the matrix."""
        return self.symmetric and self.kept <= MOST_SUMS

    @property
    def _processors(self) -> int:
        """Programs that run at a time."""
        if interpreted():
            return 4
        return 2 * int(torch.cuda.get_device_properties(self.x.values.device).multi_processor_count)

    def gradients(
        self, x: Tensor, y: Tensor, grad: Tensor, shifts: Tensor, candidates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient (A, d) of x and, if asked for, (C, d) of y from that of the sums (N, A).

        Args:
            x: (A, d) and
            y: (C, d) in float32, of which the factors are.
            grad: (N, A), or (N, A + C) where the rows of both sides are served.
            shifts: (S, A), or (S, A + C), as `sums` gave them.
            candidates: whether that of y is wanted; where x is y, the first is that of both.
        """
        grad, shifts = grad.contiguous(), shifts.contiguous()
        if x.shape[1] > (32 if interpreted() else WIDEST):
            return self._banded(x, y, grad, shifts, candidates)
        dx = self._gradient("both" if self.symmetric else "rows", grad, shifts)
        return dx, self._gradient("columns", grad, shifts) if candidates else None

    def _gradient(self, side: Side, grad: Tensor, shifts: Tensor) -> Tensor:
        """(A, d) or, for "columns", (C, d): the gradient of the rows of one side."""
        own, other = (self.y, self.x) if side == "columns" else (self.x, self.y)
        text, numbers = backward(self.summands, side, self.mutual)
        rows, width = own.values.shape
        splits, chunk = self._splits(rows, len(other.values))
        out = torch.zeros(splits, rows, width, device=grad.device)
        given = {**self._upstream(side, grad, shifts), "out": out, "BD": max(16, _kind(width))}
        self._launch(text, numbers, BACKWARD, own, other, splits, {"chunk": chunk}, given)
        return out[0] if splits == 1 else out.sum(0)

    def _upstream(self, side: Side, grad: Tensor, shifts: Tensor) -> dict[str, Tensor]:
        """Gradients and shifts as a kernel takes them: those of both sides apart, first those of the rows it owns."""
        if not self.mutual:
            return {"grad": grad, "shifts": shifts}
        count = len(self.x.values)
        parts = [slice(None, count), slice(count, None)]
        own, other = reversed(parts) if side == "columns" else parts
        return {
            "grad": grad[:, own].contiguous(),
            "shifts": shifts[:, own].contiguous(),
            "grad_other": grad[:, other].contiguous(),
            "shifts_other": shifts[:, other].contiguous(),
        }

    def _banded(
        self, x: Tensor, y: Tensor, grad: Tensor, shifts: Tensor, candidates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients from dL/ds of some anchors at a time: a tile is formed once, whatever the width."""
        text, numbers = band(self.summands, self.symmetric, self.mutual)
        upstream = self._upstream("rows", grad, shifts)
        kind = torch.bfloat16 if self.half else torch.float32
        rows, columns = len(x), len(y)
        most = band_rows(columns, kind.itemsize)
        stride = -(-columns // 16) * 16  # rows that begin at 32 bytes are read by whole vectors
        held = torch.empty(min(most, rows), stride, dtype=kind, device=x.device)
        dx, dy = torch.empty_like(x), torch.zeros_like(y) if candidates else None
        near = x.to(kind)
        far = near if y is x else y.to(kind)
        for start in range(0, rows, most):
            end = min(start + most, rows)
            splits, chunk = self._splits(end - start, columns)
            given = {**upstream, "out": held, "stride": stride}
            counts = {"chunk": chunk, "start": start, "end": end}
            self._launch(text, numbers, BANDED, self.x, self.y, splits, counts, given)
            slopes = held[: end - start, :columns]
            dx[start:end] = _multiplied(slopes, far)
            if dy is not None:
                dy += _multiplied(slopes.T, near[start:end])
        return dx, dy

    def _splits(self, own: int, other: int) -> tuple[int, int]:
        """Into how many runs the side that is visited is cut, so that few rows fill a device; rows of each run."""
        shortest, step = (64, 32) if interpreted() else (SHORTEST, 128)
        wanted = self._processors // -(-own // step)
        splits = max(1, min(wanted, other // shortest))
        chunk = max(step, -(-other // (splits * step)) * step)
        return max(1, -(-other // chunk)), chunk

    def _launch(
        self,
        text: str,
        numbers: Sequence[float],
        choice: Mapping[bool, tuple[Blocks, ...]],
        own: Factors,
        other: Factors,
        splits: int,
        counts: Mapping[str, int],
        given: Mapping[str, Any],
    ) -> None:
        width, listed = own.values.shape[1], self.lists.shape[1]
        blocks = choice[self.half]
        if text.startswith(("def half", "def pair")):
            blocks = SQUARE[self.half]
        blocks = tuple(each for each in blocks if self.kept <= each.sums)
        if interpreted():
            blocks = (INTERPRETED,)
        whole = width <= (32 if interpreted() else WHOLE[self.half])
        flags: dict[str, Any] = {
            "D": width,
            "SCALED": own.scale is not None,
            "FEW": listed if listed <= FEW else -1,
            "PRECISION": "tf32" if tf32_allowed() else "ieee",
        }
        rows = len(own.values)
        visited = counts["end"] - counts["start"] if text.startswith(("def band", "def pair")) else rows

        def grid(meta: Mapping[str, int]) -> tuple[int, ...]:
            return triton.cdiv(visited, meta["BM"]), splits

        arguments: dict[str, Any] = {
            "x": own.values,
            "y": other.values,
            "x_scale": own.scale,
            "y_scale": other.scale,
            "lists": self.lists,
            **given,
            "own_size": rows,
            "other_size": len(other.values),
            "width": listed,
            "steps": listed.bit_length(),
            "start": 0,
            "end": 0,
            **counts,
            "own_kind": _kind(rows),
            "other_kind": _kind(len(other.values)),
            **{f"k{number}": value for number, value in enumerate(numbers)},
            **flags,
        }
        with torch.cuda.device_of(own.values):  # Triton launches on the current device, which may be another
            if self.tune and len(blocks) > 1:
                _tuned(text, blocks, width, whole)[grid](**arguments)
            else:
                first = blocks[0]
                form = shape(first, width, whole)
                built(text)[grid](**arguments, **form, num_warps=first.warps, num_stages=first.stages)


def band_rows(columns: int, size: int) -> int:
    """Anchors whose dL/ds of some columns are held at a time, numbers of `size` bytes each."""
    step = 32 if interpreted() else 256
    return step if interpreted() else max(step, BAND // (columns * size) // step * step)


def _multiplied(slopes: Tensor, rows: Tensor) -> Tensor:
    """The product of two matrices in float32, whatever they are in."""
    if slopes.dtype == torch.float32:
        return slopes @ rows
    if slopes.is_cuda:
        return torch.mm(slopes, rows, out_dtype=torch.float32)
    return slopes.float() @ rows.float()


def _joined(
    summands: Sequence[Summand], sums: Tensor, shifts: Tensor, best: Tensor, where: Tensor
) -> dict[str, Tensor]:
    """The shares of a row made one, in their order."""
    if len(sums) == 1:
        return {"sums": sums[0], "shifts": shifts[0], "best": best[0], "where": where[0]}
    shift = shifts.amax(0)
    weights = (shifts - shift).exp()
    kept = [weights[:, number] for number, each in enumerate(summands) for _ in range(each.first, each.stop)]
    total = (sums * torch.stack(kept, 1)).sum(0) if kept else sums[0]
    top = best.amax(0)
    # Of equal ones the first; a share without any has -1.
    places = torch.where((best == top) & (where >= 0), where, torch.iinfo(where.dtype).max).amin(0)
    return {"sums": total, "shifts": shift, "best": top, "where": torch.where(top > -torch.inf, places, -1)}


def tf32_allowed() -> bool:
    """Whether PyTorch's own switch lets float32 products be rounded to TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")  # the older switches set it too
