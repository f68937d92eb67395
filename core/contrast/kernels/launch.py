"""Kernels built and launched: one for the forward pass of a matrix, one or two for the backward pass."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from dipole.core.contrast.kernels import device
from dipole.core.contrast.kernels.source import Side, Summand, backward, forward
from dipole.core.contrast.statistics import Extreme

# The running maximum of a row before its first entry: finite, so that the difference of two is a number.
LOWEST = -1e30
COUNTS = ("own_size", "other_size", "width", "steps", "chunk", "own_kind", "other_kind")
HALF = (torch.bfloat16, torch.float16)
# Rows of the side that is visited that a program sees at least, where it is split to fill a device.
SHORTEST = 1024
# Lists up to this length are compared entry by entry where one of them meets a tile.
FEW = 8


@dataclass(frozen=True)
class Blocks:
    """The shape of a program: rows it owns, rows it visits at a time, columns of a product, warps, stages."""

    own: int
    other: int
    columns: int
    warps: int
    stages: int


# The first of each is taken untuned; benchmarks choose among them where tuning is allowed.
FORWARD = {
    True: (Blocks(128, 64, 64, 8, 3), Blocks(128, 128, 64, 8, 3), Blocks(64, 64, 64, 4, 3)),
    False: (Blocks(32, 32, 32, 4, 2), Blocks(64, 32, 32, 4, 2), Blocks(64, 64, 32, 8, 2)),
}
BACKWARD = {
    True: (Blocks(128, 64, 64, 8, 2), Blocks(64, 64, 64, 4, 2), Blocks(64, 32, 64, 4, 3)),
    False: (Blocks(32, 32, 32, 4, 2), Blocks(64, 32, 32, 8, 2)),
}
# Embeddings up to this width are held whole, wider ones are multiplied a piece at a time.
WHOLE = {True: 128, False: 32}
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
        triton.Config(_shape(each, width, whole), num_warps=each.warps, num_stages=each.stages) for each in blocks
    ]
    key = ["own_kind", "other_kind", "D", "SCALED", "FEW", "PRECISION"]
    return triton.autotune(configs, key=key, cache_results=True)(built(text))


def _shape(blocks: Blocks, width: int, whole: bool) -> dict[str, int]:
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
    """

    x: Factors
    y: Factors
    lists: Tensor
    symmetric: bool
    summands: tuple[Summand, ...]
    extremes: tuple[Extreme, ...]
    tune: bool = False

    @property
    def half(self) -> bool:
        return self.x.values.dtype in HALF

    def sums(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Sums (N, A), their shifts (S, A), and indices (A,)."""
        rows, columns = len(self.x.values), len(self.y.values)
        text, numbers = forward(self.summands, self.extremes)
        parts = len(self.summands) and self.summands[-1].stop
        splits, chunk = self._splits(rows, columns)
        new = partial(torch.zeros, device=self.x.values.device)
        sums = new(splits, parts, rows)
        shifts = new(splits, len(self.summands), rows)
        best = new(splits, len(self.extremes), rows)
        where = torch.full((splits, len(self.extremes), rows), -1, dtype=torch.int32, device=sums.device)
        out = {"sums": sums, "shifts": shifts, "best": best, "where": where}
        self._launch(text, numbers, FORWARD, self.x, self.y, splits, chunk, out)
        return _joined(self.summands, sums, shifts, best, where)

    def gradient(self, side: Side, grad: Tensor, shifts: Tensor) -> Tensor:
        """(A, d) or, for "columns", (C, d): the gradient of the rows of one side, from that of the sums (N, A)."""
        own, other = (self.y, self.x) if side == "columns" else (self.x, self.y)
        text, numbers = backward(self.summands, side)
        rows, width = own.values.shape
        splits, chunk = self._splits(rows, len(other.values), -(-width // self._gradient_columns))
        out = torch.zeros(splits, rows, width, device=grad.device)
        given = {"grad": grad.contiguous(), "shifts": shifts.contiguous(), "out": out}
        self._launch(text, numbers, BACKWARD, own, other, splits, chunk, given)
        return out[0] if splits == 1 else out.sum(0)

    @property
    def _gradient_columns(self) -> int:
        return min(max(16, _kind(self.x.values.shape[1])), 32 if interpreted() else 128)

    def _splits(self, own: int, other: int, programs: int = 1) -> tuple[int, int]:
        """Into how many runs the side that is visited is cut, so that few rows fill a device; rows of each run."""
        if interpreted():
            wanted, shortest, step = 2, 64, 32
        else:
            processors = torch.cuda.get_device_properties(self.x.values.device).multi_processor_count
            wanted, shortest, step = 2 * processors // (-(-own // 128) * programs), SHORTEST, 128
        splits = max(1, min(wanted, other // shortest))
        chunk = -(-other // (splits * step)) * step
        return -(-other // chunk), chunk

    def _launch(
        self,
        text: str,
        numbers: Sequence[float],
        choice: Mapping[bool, tuple[Blocks, ...]],
        own: Factors,
        other: Factors,
        splits: int,
        chunk: int,
        given: Mapping[str, Tensor],
    ) -> None:
        width, listed = own.values.shape[1], self.lists.shape[1]
        blocks = (INTERPRETED,) if interpreted() else choice[self.half]
        whole = width <= (32 if interpreted() else WHOLE[self.half])
        flags = {
            "D": width,
            "SCALED": own.scale is not None,
            "FEW": listed if listed <= FEW else -1,
            "PRECISION": "tf32" if tf32_allowed() else "ieee",
        }
        if "out" in given:
            flags["BD"] = self._gradient_columns
        pieces = -(-width // flags["BD"]) if "out" in given else 1
        rows = len(own.values)

        def grid(meta: Mapping[str, int]) -> tuple[int, ...]:
            programs = triton.cdiv(rows, meta["BM"])
            return (programs, pieces, splits) if "out" in given else (programs, splits)

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
            "chunk": chunk,
            "own_kind": _kind(rows),
            "other_kind": _kind(len(other.values)),
            **{f"k{number}": value for number, value in enumerate(numbers)},
            **flags,
        }
        if self.tune and len(blocks) > 1:
            _tuned(text, blocks, width, whole)[grid](**arguments)
        else:
            first = blocks[0]
            shape = _shape(first, width, whole)
            built(text)[grid](**arguments, **shape, num_warps=first.warps, num_stages=first.stages)


def _joined(
    summands: Sequence[Summand], sums: Tensor, shifts: Tensor, best: Tensor, where: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The runs of a row made one, in their order."""
    index, top = where[0], best[0]
    for value, place in zip(best[1:], where[1:], strict=True):
        index, top = torch.where(value > top, place, index), torch.maximum(top, value)
    if len(sums) == 1:
        total, shift = sums[0], shifts[0]
    else:
        shift = shifts.amax(0)
        weights = torch.ones_like(sums)
        for number, each in enumerate(summands):
            if each.running:
                weights[:, each.first : each.stop] = (shifts[:, number] - shift[number]).exp().unsqueeze(1)
        total = (sums * weights).sum(0)
    return total, shift, list(index.long())


def tf32_allowed() -> bool:
    """Whether PyTorch's own switch lets float32 products be rounded to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32" or torch.get_float32_matmul_precision() != "highest"
