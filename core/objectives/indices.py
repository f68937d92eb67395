"""Arithmetic of the indices and row values that pairs are made of; nothing here reads a value back from the device."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor

Shape = TypeVarTuple("Shape")
Made = TypeVar("Made")


def remembered(make: Callable[[*Shape], Made]) -> Callable[[*Shape], Made]:
    """Indices that shapes alone decide are made once: at 32 rows a tenth of a step. Nobody may write to them.

    What is made inside `torch.inference_mode` could not be used by autograd later; what is made under another mode
    (fake tensors, a tracing compiler) is nothing to keep.
    """
    kept = lru_cache(maxsize=64)(make)

    @wraps(make)
    def get(*args: *Shape) -> Made:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return make(*args)
        if not torch.is_inference_mode_enabled():
            return kept(*args)
        with torch.inference_mode(False):
            return kept(*args)

    return get


@remembered
def numbers(count: int, device: torch.device) -> Tensor:
    """0 to count - 1, (count,)."""
    return torch.arange(count, device=device)


@remembered
def column(count: int, device: torch.device) -> Tensor:
    """0 to count - 1, (count, 1)."""
    return torch.arange(count, device=device).unsqueeze(1)


@remembered
def other_views(count: int, batch: int, device: torch.device) -> Tensor:
    """(count * batch, count - 1) rows of the other views of each row's instance, of views that follow one another."""
    own = torch.arange(count * batch, device=device).unsqueeze(1)
    return (own + torch.arange(1, count, device=device) * batch) % (count * batch)


@remembered
def own_side(batch: int, device: torch.device) -> Tensor:
    """(2 * batch, batch) all rows of the half that each row belongs to, beginning with itself."""
    row = torch.arange(2 * batch, device=device).unsqueeze(1)
    return row - row % batch + (row + torch.arange(batch, device=device)) % batch


@remembered
def repeated_numbers(count: int, times: int, device: torch.device) -> Tensor:
    """0 to count - 1, so many times, (times * count,)."""
    return torch.arange(count, device=device).repeat(times)


@remembered
def filled(count: int, value: int, device: torch.device) -> Tensor:
    """The same number everywhere, (count,)."""
    return torch.full((count,), value, device=device)


def instances_of(rows: dict[str, Tensor], count: int, device: torch.device) -> Tensor:
    """(B,) what the domain calls the instances, or their places in the batch."""
    return rows["index"] if "index" in rows else torch.arange(count, device=device)


def relative(dropped: Tensor, batch: int, count: int) -> dict[str, Tensor]:
    """Indices (B, E) into `count` keys and a queue as (number of the key, rows ahead), which gathering leaves true."""
    in_keys = dropped < count * batch
    row = torch.arange(batch, device=dropped.device).unsqueeze(1)
    number = torch.where(in_keys, torch.where(dropped < 0, -1, dropped // batch), count)
    return {
        "dropped_key": number,
        "dropped_ahead": torch.where(in_keys, dropped % batch - row, dropped - count * batch),
    }


def absolute(rows: dict[str, Tensor], batch: int, count: int) -> Tensor:
    """The same indices in the batch of all ranks."""
    number, ahead = rows["dropped_key"], rows["dropped_ahead"]
    row = torch.arange(batch, device=number.device).unsqueeze(1)
    return torch.where(number < 0, -1, number * batch + torch.where(number < count, row + ahead, ahead))


def pads_last(index: Tensor) -> Tensor:
    """The same rows with -1 behind the real entries, so that the first positive is one."""
    return index.gather(1, (index < 0).long().argsort(dim=1, stable=True))


def is_listed(index: Tensor, lists: Tensor) -> Tensor:
    """(A, n) whether each of the indices (A, n) stands in its row of the lists (A, E)."""
    if not lists.shape[1]:
        return torch.zeros_like(index, dtype=torch.bool)
    ordered = lists.sort(1).values
    place = torch.searchsorted(ordered, index.contiguous()).clamp_max(lists.shape[1] - 1)
    return ordered.gather(1, place) == index


def repeat(values: Tensor | None, count: int) -> Tensor | None:
    return None if values is None else values.repeat(count)


def padded(values: Tensor | None, count: int) -> Tensor | None:
    """Values (n,) with `count` times -1 behind them."""
    return None if values is None else torch.cat([values, values.new_full((count,), -1)]) if count else values


def joined(values: Tensor | None, more: Tensor | None, start: int) -> Tensor | None:
    return None if values is None or more is None else torch.cat([values, more[start:]])


def runs_of(runs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return torch.cat([torch.full((rows,), view, device=device) for view, rows in runs])
