"""What goes from the host to an accelerator, so that neither waits for the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to CUDA through pinned memory, which the device fetches while the host goes on."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class AsyncHostCopy:
    """A tensor on its way from the device; reading it waits for that one alone, not for what was begun after it."""

    def __init__(self, x: Tensor) -> None:
        import torch

        self._event: Any = None
        if x.device.type == "cuda":
            self._there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._there = x.detach().clone()

    def read(self) -> Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._there.cpu()


def constant(values: tuple[Any, ...], like: Tensor) -> Tensor:
    """Numbers as a tensor of the device and dtype of another, sent there once. Nobody may write to it."""
    return _constant(values, like.dtype, like.device)


@lru_cache(maxsize=64)
def _constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    import torch

    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def generator(seed: int, device: torch.device) -> torch.Generator | None:
    """A generator of random numbers on a device; None on meta, where nothing is drawn."""
    import torch

    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def prefetched(items: Iterator[T], device: torch.device | None = None) -> Iterator[T]:
    """The same items in the same order, each made by a thread while the one before is in use.

    Args:
        items: drawn from one at a time, always in the same thread.
        device: where the items' tensors are made. On CUDA they are made on a stream of their own, beside the step that
            is under way; whoever takes one goes on when it is there.
    """
    import torch

    aside = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def make() -> tuple[T | None, Any]:
        if aside is None:
            return next(items, None), None
        with torch.cuda.stream(aside):
            item = next(items, None)
            return item, aside.record_event()

    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(make)
        while True:
            item, made = future.result()
            if item is None:
                return
            if made is not None:
                now = torch.cuda.current_stream(device)
                now.wait_event(made)
                for each in tensors_in(item):
                    # Its memory goes back to the stream that made it: not before this one has done with it.
                    if each.is_cuda:
                        each.record_stream(now)
            future = pool.submit(make)
            yield item


def tensors_in(item: Any) -> Iterator[Tensor]:
    """The tensors of nested lists, tuples, dictionaries and dataclasses."""
    import torch

    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict):
        for each in item.values():
            yield from tensors_in(each)
    elif isinstance(item, (list, tuple)):
        for each in item:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from tensors_in(getattr(item, field.name))
