"""Asynchronous copies between host and accelerator."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. Copies to CUDA are asynchronous, through pinned memory."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def constant(values: tuple[Any, ...], like: Tensor) -> Tensor:
    """Return cached numbers with the device and dtype of a tensor. Do not write to the result."""
    return _constant(values, like.dtype, like.device)


@lru_cache(maxsize=64)
def _constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def generator(seed: int, device: torch.device) -> torch.Generator | None:
    """Return a random generator on a device, or None on meta."""
    if device.type == "meta":
        return None
    return torch.Generator(device).manual_seed(seed)


def prefetched(items: Iterator[T], device: torch.device | None = None) -> Iterator[T]:
    """Yield the same items in order, and make the next one meanwhile, always in the same thread.

    On CUDA their tensors are made on their own stream, in parallel with the current step.
    """
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
                    # Its memory must not return to the other stream before this stream has used it.
                    if each.is_cuda:
                        each.record_stream(now)
            future = pool.submit(make)
            yield item


def tensors_in(item: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, dictionaries and dataclasses."""
    for leaf in tree_leaves(item):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
