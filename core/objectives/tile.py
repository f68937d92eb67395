"""Tiles of the similarity matrix x y^T, and which entries of them take no part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """Rows of the matrix that a tile serves, and the axis of the tile along which their entries lie."""

    rows: slice
    axis: int


@dataclass(frozen=True)
class Tile:
    """One block of the similarity matrix."""

    rows: slice
    columns: slice
    s: Tensor  # (R, T)
    excluded: Tensor | None  # (R, T) True where an entry takes no part; None where all do, or where they are listed
    sides: tuple[Side, ...]
    listed: Tensor | None = None  # (R, E) columns that take no part in each row, none of them padding
    _exp: dict[float, Tensor] = field(default_factory=dict)

    def exp(self, scale: float) -> Tensor:
        """e^{scale s}, (R, T), 0 where excluded; formed once for all statistics and both passes."""
        if scale not in self._exp:
            self._exp[scale] = self.allowed_(torch.mul(self.s, scale).exp_(), 0.0)
        return self._exp[scale]

    def allowed(self, values: Tensor, fill: float) -> Tensor:
        """The values (R, T) with a number in place of what is excluded."""
        if self.listed is not None:
            return values.scatter(1, self.listed, fill)
        return values if self.excluded is None else values.masked_fill(self.excluded, fill)

    def allowed_(self, values: Tensor, fill: float) -> Tensor:
        """The same, written into the values: a copy less, 25 % of a step where one tile is all (B = 256)."""
        if self.listed is not None:
            return values.scatter_(1, self.listed, fill)
        return values if self.excluded is None else values.masked_fill_(self.excluded, fill)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Its tensors, to be saved for a backward pass, which lets go of them when it is done."""
        return self.s, self.excluded, self.listed, *self._exp.values()

    @property
    def formed(self) -> tuple[float, ...]:
        """The scales whose exponentials were formed, in the order of their tensors."""
        return tuple(self._exp)

    def emptied(self) -> "Tile":
        """Where it lies and which exponentials were formed, without the tensors."""
        nothing = self.s.new_empty(0)
        return replace(self, s=nothing, excluded=None, listed=None, _exp=dict.fromkeys(self._exp, nothing))

    def filled(self, tensors: Sequence[Tensor]) -> "Tile":
        """An emptied tile with its `tensors` again; takes as many of them as it had."""
        s, excluded, listed, *exps = tensors[: 3 + len(self._exp)]
        exp = dict(zip(self._exp, exps, strict=True))
        return replace(self, s=s, excluded=excluded, listed=listed, _exp=exp)


@dataclass(frozen=True)
class Tiling:
    """How a matrix is cut into tiles.

    Args:
        excluded: (A, E) columns that take no part in a row; those outside the matrix are ignored.
        symmetric: x is y and exclusion is mutual: a tile (I, J) serves the rows of I and, transposed, the rows of J,
            and only the upper triangle is formed.
        side: rows and columns of a tile.
    """

    excluded: Tensor
    symmetric: bool
    side: int

    def tiles(self, x: Tensor, y: Tensor) -> Iterator[Tile]:
        """The tiles of x y^T, row by row."""
        on_cpu = x.device.type == "cpu"
        for top in range(0, len(x), self.side):
            rows = slice(top, min(top + self.side, len(x)))
            excluded = self.excluded[rows]
            # Masks where they are needed only: 13 % of a step at B = 4096 on a CPU. An accelerator would have to wait.
            touched = set(excluded.div(self.side, rounding_mode="floor").unique().tolist()) if on_cpu else None
            for left in range(top if self.symmetric else 0, len(y), self.side):
                columns = slice(left, min(left + self.side, len(y)))
                s = x[rows] @ y[columns].T
                sides = (Side(rows, 1), Side(columns, 0)) if self.symmetric and left > top else (Side(rows, 1),)
                free = touched is not None and left // self.side not in touched
                yield Tile(rows, columns, s, None if free else mask_of(excluded - left, s.shape[1]), sides)


def mask_of(index: Tensor, width: int) -> Tensor:
    """True at the listed columns (R, E) of a tile (R, T), (R, T); those outside the tile are left out."""
    inside = (index >= 0) & (index < width)
    mask = torch.zeros(len(index), width + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, torch.where(inside, index, width), True)[:, :width]  # the last column takes the rest
