"""The kit's stand-in for an accelerator. Copies of many numbers back to the processor are errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dipole.core.conformance.modes import DEVICE, Accelerator, Elsewhere

ELSEWHERE = DEVICE


class _Device(Accelerator):
    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(function, types, args, kwargs)
        far = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Elsewhere)]
        there = any(isinstance(each, Elsewhere) for each in tree_leaves(found))
        if far and not there and far[0].numel() > self.largest:
            raise AssertionError(f"{function} brings {tuple(far[0].shape)} back to the processor")
        return found


@contextmanager
def elsewhere(largest: int) -> Iterator[None]:
    """Inside, the device is there, and copies of more than `largest` numbers back to the processor are errors."""
    take = Tensor.__getitem__
    by_hand = {  # what goes past dispatch, or ends in a tensor of "meta" that has no numbers
        "tolist": lambda self: self.cpu().tolist(),
        "new_tensor": lambda self, data, **kwargs: Elsewhere(self.held.new_tensor(data, **kwargs)),
        "__getitem__": lambda self, i: take(self, torch.tensor(i) if isinstance(i, list) else i),
    }
    with patch.multiple(Elsewhere, create=True, **by_hand), _Device(largest):
        yield


def sent(x: Tensor) -> Tensor:
    """A copy on the device."""
    return Elsewhere(x.detach().clone())
