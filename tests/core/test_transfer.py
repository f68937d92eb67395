"""Batches made ahead, and tensors on their way to a device."""

import json
import threading
from collections.abc import Iterator

import torch

from dipole.core.utils.transfer import constant, prefetched, tensors_in, to_device


def test_one_batch_is_made_ahead_in_order_and_by_one_thread():
    made: list[tuple[int, int]] = []

    def items() -> Iterator[int]:
        for number in range(5):
            made.append((number, threading.get_ident()))
            yield number

    taken = prefetched(items())
    assert next(taken) == 0
    assert list(taken) == [1, 2, 3, 4]
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in made} | {threading.get_ident()}) == 2


def test_what_goes_to_a_device_arrives_unchanged():
    cpu = torch.device("cpu")
    x = torch.arange(3.0)
    assert to_device(x, cpu) is x
    assert constant((1.0, 2.0), x) is constant((1.0, 2.0), x)
    nested = {"a": [x, (x, 1)], "b": json}
    assert sum(1 for _ in tensors_in(nested)) == 2
