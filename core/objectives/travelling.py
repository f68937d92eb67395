"""Rows that every rank can arrange, pair and count, though each rank holds its own alone.

`relate` cuts, stacks and joins the rows of all ranks, but it does not look into them. A `Travelling` stands for such
rows: a tensor of the right shape without contents, which knows of each of its rows whose it is. What is done to it
besides arranging gathers the rows from all ranks, with gradient, and goes on with those; so code that knows nothing of
it is right, and all ranks must run it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dipole.core.utils.distributed import gather_rows, rank, world_size
from dipole.core.utils.errors import PairsError


class Shares:
    """The tables whose rows travel: of each this rank's rows, and how many every rank has; and what is held by all.

    Rows are numbered through: table by table, in each the rows of rank 0 first. What every rank holds alike (a queue)
    is numbered downwards from -1.
    """

    def __init__(self) -> None:
        self.tables: list[tuple[Tensor, list[int]]] = []
        self.held: list[Tensor] = []
        self._gathered: dict[bool, list[Tensor]] = {}

    def add(self, rows: Tensor, sizes: Sequence[int]) -> Travelling:
        """A stand-in for the rows (sizes[rank], ..., d) of all ranks: (sum of sizes, ..., d)."""
        shape = sum(sizes), *rows.shape[1:]
        start = self._length
        each = math.prod(rows.shape[1:-1])
        self.tables.append((rows.reshape(-1, rows.shape[-1]), [size * each for size in sizes]))
        places = torch.arange(start, self._length).view(shape[:-1])
        return Travelling(self, places, rows.dtype)

    def hold(self, rows: Tensor) -> Tensor:
        """Numbers of rows (..., d) that all ranks hold alike."""
        start = -1
        for known in self.held:
            if known is rows:
                break
            start -= known.numel() // known.shape[-1]
        else:
            self.held.append(rows)
        count = rows.numel() // rows.shape[-1]
        return (start - torch.arange(count)).view(rows.shape[:-1])

    @property
    def _length(self) -> int:
        return sum(sum(sizes) for _, sizes in self.tables)

    @property
    def like(self) -> Tensor:
        """A row of the kind of all."""
        return self.tables[0][0]

    @cached_property
    def _numbers(self) -> Tensor:
        """Of each row in order: the rank it belongs to and its place there, (2, rows)."""
        owners = [torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)) for _, sizes in self.tables]
        local, before = [], [0] * len(self.tables[0][1])
        for _, sizes in self.tables:
            local += [torch.arange(start, start + size) for start, size in zip(before, sizes, strict=True)]
            before = [start + size for start, size in zip(before, sizes, strict=True)]
        return torch.stack([torch.cat(owners), torch.cat(local)])

    def owner(self, places: Tensor) -> Tensor:
        """Rank of each row; -1 for what all hold."""
        return torch.where(places < 0, -1, self._numbers[0][places.clamp_min(0)])

    def mine(self, places: Tensor) -> Tensor:
        """The rows (n, d) of this rank that have these numbers, with gradient."""
        return _taken([rows for rows, _ in self.tables], self._numbers[1][places])

    def of_all(self, places: Tensor) -> Tensor:
        """The same of numbers held by all, (n, d)."""
        return _taken([rows.reshape(-1, rows.shape[-1]) for rows in self.held], -1 - places)

    @property
    def _everybodys(self) -> list[Tensor]:
        with_gradient = torch.is_grad_enabled()
        if with_gradient in self._gathered:
            return self._gathered[with_gradient]
        if world_size() == 1:
            raise PairsError(
                "the candidates of these pairs lie on several ranks, and one rank alone asks for them; look at them "
                "while all ranks do, or compute without a ring (objective.ring = False)."
            )
        self._gathered[with_gradient] = [gather_rows(rows, sizes) for rows, sizes in self.tables]
        return self._gathered[with_gradient]

    def gathered(self, places: Tensor) -> Tensor:
        """Rows of all ranks, and of what is held, with gradient: (n, d)."""
        held = [rows.reshape(-1, rows.shape[-1]) for rows in self.held]
        return _taken([*self._everybodys, *held], torch.where(places < 0, self._length - 1 - places, places))


def _taken(tables: Sequence[Tensor], index: Tensor) -> Tensor:
    """Rows of the tables, one below the other."""
    if not len(index):
        return tables[0][:0]
    low, high, start = int(index.min()), int(index.max()), 0
    asked: list[Tensor] = []
    for table in tables:
        end = start + len(table)
        if low < end and start <= high:
            index = index if asked else index - start
            asked.append(table)
        start = end
    rows = asked[0] if len(asked) == 1 else torch.cat(asked)
    first, stop = int(index[0]), int(index[0]) + len(index)
    if torch.equal(index, torch.arange(first, stop)):
        return rows if stop - first == len(rows) else rows[first:stop]
    return rows[index.to(rows.device, non_blocking=True)]


class Travelling(Tensor):
    """A stand-in for rows (..., d) that lie on all ranks.

    `places` (...) says which row of `shares` each of its rows is; it lies on the CPU, so that nothing waits for it.
    `lists` holds the positives of each rank's anchors where they are known to matter (`ring.Course`).
    """

    shares: Shares
    places: Tensor
    lists: tuple[Tensor, ...] | None

    @staticmethod
    def __new__(cls, shares: Shares, places: Tensor, dtype: torch.dtype) -> Travelling:
        like = shares.like
        made: Travelling = Tensor._make_wrapper_subclass(
            cls, (*places.shape, like.shape[1]), dtype=dtype, device=like.device
        )
        made.shares, made.places, made.lists = shares, places, None
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Travelling({tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def own(self) -> bool:
        """Whether all of its rows are this rank's."""
        return bool((self.shares.owner(self.places) == rank()).all())

    def here(self) -> Tensor:
        """The rows themselves, of which all are this rank's."""
        return self._shaped(self.shares.mine(self.places.flatten()))

    def everywhere(self) -> Tensor:
        """The rows themselves, gathered from all ranks; a collective."""
        return self._shaped(self.shares.gathered(self.places.flatten()))

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype).view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _CAST:
            return _cast(func, args, kwargs)
        if func in _ARRANGED:
            arranged = _arranged(func, args, kwargs)
            if arranged is not None:
                return arranged
        args, kwargs = _each(lambda x: x.everywhere() if isinstance(x, Travelling) else x, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} was asked of rows that lie on several ranks, past `__torch_function__`.")


_ASKED = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cpu", "is_cuda", "is_meta", "requires_grad")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.element_size),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
}
"""What the shape, dtype and device answer."""
_CAST = {Tensor.float, Tensor.double, Tensor.to, torch.zeros_like}
_ARRANGED = {
    *(torch.cat, torch.concat, torch.stack, Tensor.__getitem__, Tensor.reshape, torch.reshape, Tensor.view),
    *(Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute),
    *(Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze, Tensor.repeat, Tensor.movedim),
    *(Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.unbind, torch.unbind, Tensor.narrow, torch.narrow),
}
"""What moves whole rows if it moves no entry out of its row."""


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """The same in another dtype, or zeros of its shape."""
    with torch._C.DisableTorchFunctionSubclass():
        x = args[0]
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        if func is torch.zeros_like:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        found = func(empty, *args[1:], **kwargs)
        if found.device == x.device:
            return x if found.dtype == x.dtype else Travelling(x.shares, x.places, found.dtype)
    return func(x.everywhere(), *args[1:], **kwargs)


def _arranged(func: Any, args: Any, kwargs: Any) -> Any:
    """The result as stand-ins, or None where rows are cut, mixed, or not to be told without their contents."""
    found: list[Travelling] = []
    rows: list[Tensor] = []
    _each(lambda x: found.append(x) if isinstance(x, Travelling) else rows.append(x), (args, kwargs), Tensor)
    shares, dtype, width = found[0].shares, found[0].dtype, found[0].shape[-1]
    if any(each.shares is not shares or each.dtype != dtype for each in found):
        return None
    index = func is Tensor.__getitem__
    for each in rows:
        # An index on a device would have to be read back; of rows that join, all must be of one kind.
        readable = each.dtype == torch.long and each.is_cpu
        alike = each.dtype == dtype and each.shape[-1:] == (width,)
        if not (readable if index else alike):
            return None

    def numbers(x: Any) -> Any:
        if isinstance(x, Travelling):
            return x.places.unsqueeze(-1)
        return x if index else shares.hold(x).unsqueeze(-1)

    def shape(x: Any) -> Any:
        return x if index and not isinstance(x, Travelling) else torch.empty(x.shape, device="meta", dtype=dtype)

    with torch._C.DisableTorchFunctionSubclass():
        try:
            whole = func(*_each(shape, args, Tensor), **_each(shape, kwargs, Tensor))
            short = _each(numbers, args, Tensor)
            if func in _SIZED:  # the last length is that of a row
                short = _with_last(short, 1, width)
            short = func(*short, **_each(numbers, kwargs, Tensor))
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            return None  # the function itself will say so, or can do it
        several = isinstance(whole, tuple | list)
        pairs = list(zip(whole, short, strict=True)) if several else [(whole, short)]
        if any(w.shape[-1:] != (width,) or s.shape[-1:] != (1,) or w.shape[:-1] != s.shape[:-1] for w, s in pairs):
            return None
        made = [Travelling(shares, s.squeeze(-1), dtype) for _, s in pairs]
    return tuple(made) if several else made[0]


_SIZED = {Tensor.reshape, torch.reshape, Tensor.view}


def _with_last(args: Any, length: int, width: int) -> Any:
    """The arguments of a reshape with another last length in place of `width`."""
    first, *sizes = args
    nested = len(sizes) == 1 and isinstance(sizes[0], tuple | list)
    sizes = list(sizes[0] if nested else sizes)
    if sizes and sizes[-1] == width:
        sizes[-1] = length
    return first, *([sizes] if nested else sizes)


def _each(change: Callable[[Any], Any], x: Any, kind: type = object) -> Any:
    """The same nest of tuples, lists and mappings with every leaf of a kind changed."""
    if isinstance(x, tuple | list):
        return type(x)(_each(change, each, kind) for each in x)
    if isinstance(x, dict):
        return {key: _each(change, each, kind) for key, each in x.items()}
    return change(x) if isinstance(x, kind) else x
