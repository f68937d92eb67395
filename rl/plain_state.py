"""Nested Python values (core/utils/plain_values.py) in two files: NAME.json for their shape, NAME.npz for arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipole.core.utils.plain_values import decode, encode
from dipole.core.utils.received import read_json


def files(name: str) -> tuple[str, str]:
    """The names of both files."""
    return f"{name}.json", f"{name}.npz"


def write(folder: Path, name: str, value: Any) -> None:
    """Write a value into a folder.

    Raises:
        CheckpointError: there is something else in it, with its place. OSError: the disk refused.
    """
    arrays: list[np.ndarray] = []

    def keep(array: Any) -> int:
        if isinstance(array, torch.Tensor):
            array = array.cpu().numpy()
        arrays.append(array)
        return len(arrays) - 1

    told = encode(value, keep, name)
    tree, stored = files(name)
    (folder / tree).write_text(json.dumps(told), encoding="utf-8")
    np.savez(folder / stored, **{str(index): array for index, array in enumerate(arrays)})  # type: ignore[arg-type]


def read(folder: Path, name: str) -> Any:
    """Read what `write` wrote. A damaged file raises Python's own errors."""
    tree, stored = files(name)
    told = read_json(folder / tree)
    with np.load(folder / stored, allow_pickle=False) as arrays:
        return decode(told, arrays)
