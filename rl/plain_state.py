"""Nested Python values in two files that hold no code: NAME.json for their shape, NAME.npz for their arrays.

None, booleans, numbers, texts, bytes, lists, tuples, sets, deques, dictionaries, NumPy's arrays, scalars and
generators, and tensors come back as they were. A pickle would run what it is told to when it is read.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipole.core.ground.errors import CheckpointError

_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set}


def files(name: str) -> tuple[str, str]:
    """The names of both files."""
    return f"{name}.json", f"{name}.npz"


def write(folder: Path, name: str, value: Any) -> None:
    """Write a value into a folder.

    Raises:
        CheckpointError: there is something else in it, with its place. OSError: the disk refused.
    """
    arrays: list[np.ndarray] = []
    told = _encode(value, arrays, name)
    tree, stored = files(name)
    (folder / tree).write_text(json.dumps(told), encoding="utf-8")
    np.savez(folder / stored, **{str(index): array for index, array in enumerate(arrays)})  # type: ignore[arg-type]


def read(folder: Path, name: str) -> Any:
    """Read what `write` wrote; an error of Python's where it is damaged."""
    tree, stored = files(name)
    told = json.loads((folder / tree).read_text(encoding="utf-8"))
    with np.load(folder / stored, allow_pickle=False) as arrays:
        return _decode(told, arrays)


def _encode(value: Any, arrays: list[np.ndarray], place: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return _stored("tensor", value.detach().cpu().numpy(), arrays)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return _stored("array" if isinstance(value, np.ndarray) else "scalar", np.asarray(value), arrays)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if type(value) is list:
        return [_encode(each, arrays, f"{place}[{index}]") for index, each in enumerate(value)]
    for kind, made in _SEQUENCES.items():
        if type(value) is made:
            parts: Any = value
            return {kind: _encode(list(parts), arrays, place)}
    if isinstance(value, deque):
        return {"deque": _encode(list(value), arrays, place), "maxlen": value.maxlen}
    if isinstance(value, dict):
        return {
            "dict": [
                [_encode(key, arrays, place), _encode(each, arrays, f"{place}.{key}")] for key, each in value.items()
            ]
        }
    if isinstance(value, np.random.Generator):
        return {"generator": _encode(value.bit_generator.state, arrays, place)}
    if isinstance(value, np.random.RandomState):
        return {"random state": _encode(value.get_state(), arrays, place)}
    raise CheckpointError(
        f"cannot save {place}, of type {type(value).__name__}: a checkpoint holds numbers, texts, arrays, tensors and "
        "random generators, in lists, tuples, sets and dictionaries, but no code. Let get_state return such parts."
    )


def _stored(kind: str, array: np.ndarray, arrays: list[np.ndarray]) -> dict[str, int]:
    arrays.append(array)
    return {kind: len(arrays) - 1}


def _decode(told: Any, arrays: Any) -> Any:
    if isinstance(told, list):
        return [_decode(each, arrays) for each in told]
    if not isinstance(told, dict):
        return told
    kind, inner = next(iter(told.items()))
    if kind in ("array", "scalar", "tensor"):
        array = arrays[str(inner)]
        return torch.from_numpy(array) if kind == "tensor" else array if kind == "array" else array[()]
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(inner, arrays))
    if kind == "deque":
        return deque(_decode(inner, arrays), told["maxlen"])
    if kind == "dict":
        return {_decode(key, arrays): _decode(each, arrays) for key, each in inner}
    state = _decode(inner, arrays)
    if kind == "random state":
        found = np.random.RandomState()
        found.set_state(state)
        return found
    if kind != "generator" or state["bit_generator"] not in _GENERATORS:
        raise ValueError(f"unknown kind {kind!r}")
    generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
    generator.bit_generator.state = state
    return generator
