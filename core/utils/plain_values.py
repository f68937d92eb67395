"""Encode nested Python values as JSON and arrays, so that a file of them contains no code.

None, booleans, numbers, strings, bytes, lists, tuples, sets, deques, dictionaries, tensors, and NumPy arrays, scalars
and generators are restored exactly. A pickle could run any code when it is read.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dipole.core.utils.errors import CheckpointError

_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set}
_ARRAYS = ("array", "scalar", "tensor")
_VERSIONS = "_metadata"
"""Attribute of a module's state_dict with the versions of its parts."""

Keep = Callable[[Any], Any]
"""Stores a tensor or an array and returns its name, a number or a string."""


def encode(value: Any, keep: Keep, place: str) -> Any:
    """Return a value as JSON. `keep` stores each tensor and array (a NumPy scalar as an array without axes).

    Raise CheckpointError if it contains another type. The message says where, starting with `place`.
    """
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": keep(value.detach())}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return {"array" if isinstance(value, np.ndarray) else "scalar": keep(np.asarray(value))}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if type(value) is list:
        return [encode(each, keep, f"{place}[{index}]") for index, each in enumerate(value)]
    if type(value) in _SEQUENCES.values():
        return {type(value).__name__: encode(list(value), keep, place)}
    if isinstance(value, deque):
        return {"deque": encode(list(value), keep, place), "maxlen": value.maxlen}
    if isinstance(value, dict):
        pairs = [[encode(key, keep, place), encode(each, keep, f"{place}.{key}")] for key, each in value.items()]
        versions = getattr(value, _VERSIONS, None)
        return {"dict": pairs} if versions is None else {"dict": pairs, "versions": encode(dict(versions), keep, place)}
    if isinstance(value, np.random.Generator):
        return {"generator": encode(value.bit_generator.state, keep, place)}
    if isinstance(value, np.random.RandomState):
        return {"random state": encode(value.get_state(), keep, place)}
    raise CheckpointError(
        f"cannot save {place}, of type {type(value).__name__}: a checkpoint holds numbers, strings, arrays, tensors "
        "and random generators, in lists, tuples, sets and dictionaries, but no code. Let get_state return these."
    )


def decode(told: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the value that `encode` wrote, given its arrays by name. Damage may raise any error of Python."""
    if isinstance(told, list):
        return [decode(each, arrays) for each in told]
    if not isinstance(told, dict):
        return told
    kind, inner = next(iter(told.items()))
    if kind in _ARRAYS:
        array = arrays[str(inner)]
        if kind == "tensor":
            return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        array = array.numpy() if isinstance(array, torch.Tensor) else array
        return array if kind == "array" else array[()]
    if kind == "float":
        return float(inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(inner, arrays))
    if kind == "deque":
        return deque(decode(inner, arrays), told["maxlen"])
    if kind == "dict":
        pairs = [(decode(key, arrays), decode(each, arrays)) for key, each in inner]
        if "versions" not in told:
            return dict(pairs)
        state: Any = OrderedDict(pairs)
        setattr(state, _VERSIONS, decode(told["versions"], arrays))
        return state
    return _generator(kind, decode(inner, arrays))


def _generator(kind: str, state: Any) -> np.random.Generator | np.random.RandomState:
    if kind == "random state":
        found = np.random.RandomState()
        found.set_state(state)
        return found
    if kind != "generator" or state["bit_generator"] not in _GENERATORS:
        raise ValueError(f"unknown kind {kind!r}")
    generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
    generator.bit_generator.state = state
    return generator
