"""Convert what an encoder returned to an array of rows, and check it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.finite import finite_rows
from dipole.core.utils.text import counted


def as_rows(value: Any, count: int, where: str) -> np.ndarray:
    """Return the vectors of `count` sentences, (n, d), finite, in float32 or float64. Raise DataError for others."""
    sentences = counted(count, "sentence")
    try:
        found = _array(value)
    except (ValueError, TypeError, RuntimeError) as error:
        said = str(error).split("\n")[0][:200]
        raise DataError(f"{where}: the vectors of {sentences} are no array of numbers ({said})") from None
    if found.dtype.kind not in "fiub":
        kind = f"values of type {type(value).__name__} ({found.dtype})"
        if found.dtype.kind in "US":
            kind = "text"
        raise DataError(f"{where}: the encoder returned {kind} for {sentences}, not numbers (n, d)")
    if found.ndim != 2 or len(found) != count or not found.shape[1]:
        raise DataError(
            f"{where}: the encoder returned an array {found.shape} for {sentences}, not one vector each (n, d)"
        )
    # Whole numbers of few bits would wrap in |u - v| and u * v, and half floats overflow.
    if found.dtype.itemsize <= 2:
        found = found.astype(np.float32)
    elif found.dtype not in (np.float32, np.float64):
        found = found.astype(np.float64)
    return finite(found, where)


def finite(rows: np.ndarray, where: str) -> np.ndarray:
    """Return the vectors (n, d). Raise DataError if one is not finite."""
    if not np.isfinite(rows).all():
        finite_rows(torch.tensor(rows), where, "vector")
    return rows


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().to_dense().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        return value.numpy()
    if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
        return np.stack([_array(each) for each in value])
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError("some are masked")
    if hasattr(value, "toarray"):  # a sparse matrix of scipy
        value = value.toarray()
    return np.asarray(value)


def same_width(parts: Sequence[np.ndarray], where: str) -> np.ndarray:
    """One array of those of several batches."""
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise DataError(f"{where}: the encoder returned vectors of {' and '.join(map(str, widths[:4]))} numbers")
    return np.concatenate(parts)


def task_names(tasks: Any) -> list[str]:
    """Names of tasks as a list, each once. Raise OptionError for anything else, and for none."""
    if isinstance(tasks, str):
        return [tasks]
    if isinstance(tasks, Iterable) and not isinstance(tasks, bytes):
        names = list(tasks)
        if isinstance(tasks, set | frozenset):
            names.sort(key=str)
        if names and all(isinstance(name, str) for name in names):
            return list(dict.fromkeys(names))
    raise OptionError(f"tasks must be names such as ['MR', 'CR'], got {str(tasks)[:60]!r}")
