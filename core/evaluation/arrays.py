"""Plain arrays as tensors: NumPy arrays, lists and tensors, checked, and in a range that squares survive."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.checks import check_tensor, shape_of
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import checked, options_of
from dipole.core.utils.errors import DipoleError, PairsError

P = ParamSpec("P")
R = TypeVar("R")

Array: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any]
"""Input of the functions on plain arrays: a tensor, a NumPy array, or a list of numbers, arrays or tensors."""

LARGE, SMALL = 2.0**40, 2.0**-30
"""Sizes beyond which squares may overflow, or a length may fall below the limits of normalisation."""


def as_tensor(name: str, x: Any, shape: str, error: type[DipoleError] = PairsError) -> Tensor:
    """Return an array as a tensor without gradient. Lists of floats become float64, and integers int64."""
    if isinstance(x, list | tuple) and x and all(isinstance(row, Tensor) for row in x):
        try:
            x = torch.stack([check_tensor(name, row, "(d,)") for row in x])
        except (RuntimeError, DipoleError) as problem:
            raise error(
                f"{name} must be of shape {shape}, got a list of tensors that do not stack: {problem}"
            ) from None
    if isinstance(x, Tensor):
        if x.device.type == "mps":  # which has no double precision
            x = x.cpu()
        try:
            return check_tensor(name, x, shape).detach()
        except PairsError as problem:
            raise error(str(problem)) from None
    if np.ma.is_masked(x):
        raise error(f"{name} is an array with masked values. Leave those rows out, or fill them: x.filled(0).")
    try:
        array = np.asarray(x)
    except Exception as problem:  # ragged lists, and arrays of other libraries on a device
        raise error(f"{name} must be numbers of shape {shape}: {problem}") from None
    kinds = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_, "c": np.complex128}
    if array.dtype.kind not in kinds:
        shown = f"{type(x).__name__} of {array.dtype}"
        if array.dtype.kind in "UO" and array.ndim == 1:
            shown += ". Number the names of classes, the same way in all parts: [names.index(each) for each in labels]"
        if hasattr(x, "toarray"):
            shown += ". Use x.toarray()"
        elif array.dtype.kind == "O" and array.ndim == 2:  # such as the nullable columns of pandas
            shown += ". Use x.astype(float)"
        raise error(f"{name} must be numbers of shape {shape}, got {shown}.")
    kind = kinds[array.dtype.kind]
    if array.dtype.kind == "f" and array.dtype.itemsize <= 4:
        kind = np.float32
    return torch.from_numpy(np.array(array, dtype=kind, order="C"))  # a copy: native, writable, no negative strides


def as_matrix(name: str, x: Any, rows: int = 1, error: type[DipoleError] = PairsError) -> Tensor:
    """Return real vectors (n, d) of floating dtype. Integers become float64."""
    shape = "(n, d)"
    if rows > 1:
        shape = f"(n >= {rows}, d)"
    found = as_tensor(name, x, shape, error)
    if found.ndim != 2 or len(found) < rows or not found.shape[1] or found.is_complex():
        raise error(f"{name} must be real vectors of shape {shape}, got {found.dtype} of shape {tuple(found.shape)}.")
    if found.is_floating_point():
        return found
    return found.double()


def as_classes(name: str, labels: Any, rows: int | None, error: type[DipoleError] = PairsError) -> Tensor:
    """Return the class of each row, integers (n,). `rows` None allows any number."""
    found = whole(as_tensor(name, labels, "(n,)", error))
    if found.is_floating_point() or found.is_complex() or found.ndim != 1 or rows not in (None, len(found)):
        count = f"{rows} integers"
        if rows is None:
            count = "integers"
        fix = ""
        if found.is_floating_point() and bool(found.isnan().any()):
            fix = " Give rows without a label -1 in place of NaN."
        raise error(f"{name} must be {count}, one per row, got {found.dtype} of shape {shape_of(found)}.{fix}")
    return found.long()


def whole(labels: Tensor) -> Tensor:
    """Return floats without a fractional part as integers, and everything else unchanged."""
    if labels.is_floating_point() and bool((labels == labels.trunc()).all()) and bool(labels.isfinite().all()):
        return labels.long()
    return labels


def moderate(x: Tensor, largest: Tensor) -> Tensor:
    """Divide (n, d) by sizes that broadcast to it, where squares of them would leave the range of floats."""
    extreme = (largest > 0) & ((largest > LARGE) | (largest < SMALL))
    if not bool(extreme.any()):
        return x
    return torch.where(extreme, x / largest, x)


def moderate_rows(x: Tensor) -> Tensor:
    """Divide each row whose size is extreme by its largest absolute value, see `moderate`."""
    return moderate(x, x.abs().amax(1, keepdim=True))


def size(x: Tensor) -> Tensor:
    """Return the largest absolute value, 0 without values."""
    if not x.numel():
        return x.new_zeros(()).abs()
    return x.abs().amax()


def every_pair(embeddings: Array | Pairs) -> Pairs:
    """Return pairs in which every other point is a negative. Pairs are returned as they are."""
    if isinstance(embeddings, Pairs):
        return embeddings
    return Pairs.of_points(as_matrix("embeddings", embeddings, rows=2))


def matched(name: str, pairs: Array | Pairs, positives: Array | None) -> Pairs:
    """Return pairs as they are, or pair row i of one array with row i of the other."""
    if isinstance(pairs, Pairs):
        if positives is not None:
            raise PairsError(f"{name} takes Pairs, or two arrays (n, d); got Pairs and an array.")
        return pairs
    if positives is None:
        raise PairsError(
            f"{name} needs positives: {name}(first, second) with two arrays (n, d) whose rows match, or Pairs such as "
            f"Pairs.both(a, b). Got {type(pairs).__name__} alone."
        )
    first, second = (full_precision(as_matrix(each, x)) for each, x in (("first", pairs), ("second", positives)))
    if first.shape != second.shape:
        raise PairsError(f"{name}: the arrays must have one shape, got {tuple(first.shape)} and {tuple(second.shape)}.")
    dtype = torch.promote_types(first.dtype, second.dtype)
    return Pairs.cross(first.to(dtype), second.to(first.device, dtype))


def in_range(function: Callable[P, R]) -> Callable[P, R]:
    """Check the options of a function at every call, as an objective's constructor does."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound, options = signature.bind(*args, **kwargs), options_of(function)
        except TypeError:
            return function(*args, **kwargs)  # Python's error, which has the function's name
        given = {option.name: bound.arguments[option.name] for option in options if option.name in bound.arguments}
        bound.arguments.update(checked(function.__name__, options, given))
        return function(*bound.args, **bound.kwargs)

    return wrapped
