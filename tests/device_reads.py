"""A stand-in for an accelerator: what would make a host wait for one, or mix devices, is an error on meta tensors.

Meta tensors hold no numbers, so reading one back raises by itself. Other reads are watched here: a
tensor that is made on the CPU on the way, a copy between devices, and decompositions that look at their own success.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dipole.core.objectives import checks

META = torch.device("meta")

# Operations that wait for their result, or for the number of their results.
WAITS = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "is_nonzero", "masked_select", "unique", "_unique",
    "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal", "_linalg_svd", "_linalg_eigh",
}  # fmt: skip
# Operations that take numbers of the host, and so an unpinned copy.
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}


class WaitError(AssertionError):
    """Something that would wait for an accelerator, or a tensor on the wrong device."""


class _Calls(TorchFunctionMode):
    """Calls that dispatch hides: they make a tensor of the host's numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tensor that is one already is handed on.
        if function in FROM_HOST and not (function is torch.as_tensor and isinstance(args[0], Tensor)):
            raise WaitError(f"{function.__name__} takes numbers of the host to the device")
        return function(*args, **(kwargs or {}))


def _tensors(*values: Any) -> list[Tensor]:
    """Return the tensors among values and in lists of them, which no operation nests further."""
    lists = (each if isinstance(each, list | tuple) else (each,) for each in values)
    return [each for values in lists for each in values if isinstance(each, Tensor)]


class _Operations(TorchDispatchMode):
    """Every operation, those of backward passes as well."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        given = _tensors(*args, *kwargs.values())
        if given and kwargs.get("device") != META and all(each.device.type == "cpu" for each in given):
            # Numbers that the host was given (lengths of sentences), where nothing of the device can have come.
            return function(*args, **kwargs)
        if name in WAITS or (name == "repeat_interleave" and function._overloadname == "Tensor"):
            raise WaitError(f"{function} waits for the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise WaitError(f"{function} with a mask waits for the number of its rows")
        if name in ("copy_", "_to_copy") and len({each.device for each in given} | {kwargs.get("device") or META}) > 1:
            raise WaitError(f"{function} copies between {sorted({str(each.device) for each in given})} and meta")
        found = function(*args, **kwargs)
        if name == "_pack_padded_sequence":  # takes its lengths from the host
            return found
        for each in (*given, *_tensors(found)):
            # A number of the host in place of a tensor is an argument of the kernel.
            if each.device != META and each.ndim and each.numel():
                raise WaitError(f"{function} meets a tensor {tuple(each.shape)} on the {each.device}")
        return found


@contextmanager
def no_reads() -> Iterator[None]:
    """Raise `WaitError` for what would wait for the device that meta tensors stand for.

    Objectives refuse meta tensors, except here.
    """
    with patch.object(checks, "has_no_values", return_value=False), _Calls(), _Operations():
        yield


@contextmanager
def no_cuda_waits() -> Iterator[None]:
    """Raise RuntimeError where the host would wait for CUDA, the device in question."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
