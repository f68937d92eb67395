"""Plain arrays as checked tensors, in a range that squares survive, and the data that every probe starts from."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.checks import check_tensor, shape_of
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import register
from dipole.core.objectives.similarity import full_precision
from dipole.core.objectives.spec import checked, options_of
from dipole.core.utils.errors import DataError, DipoleError, PairsError
from dipole.core.utils.text import counted

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
        if array.dtype.kind in "UO" and shape == "(n,)":
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
    shape = f"(n >= {rows}, d)" if rows > 1 else "(n, d)"
    found = as_tensor(name, x, shape, error)
    if found.ndim != 2 or len(found) < rows or not found.shape[1] or found.is_complex():
        fix = " Flatten them: x.flatten(1)." * (found.ndim > 2)
        got = f"{found.dtype} of shape {tuple(found.shape)}"
        raise error(f"{name} must be real vectors of shape {shape}, got {got}.{fix}")
    return found if found.is_floating_point() else found.double()


def finite_rows(rows: Tensor, name: str, one: str = "row") -> Tensor:
    """Return the vectors (n, d) if they are finite. The ranks and counts of NaN look like those of a good encoder."""
    if rows.is_floating_point() and not bool(rows.isfinite().all()):
        bad = int((~rows.isfinite()).flatten(1).any(1).sum())
        raise DataError(
            f"{name}: {bad} of {counted(len(rows), one)} are not finite (NaN or infinity): the encoder has "
            "diverged, or a half float overflowed. Look at the run's loss, or encode in float32."
        )
    return rows


def as_classes(name: str, labels: Any, rows: int | None, error: type[DipoleError] = PairsError) -> Tensor:
    """Return the class of each row, integers (n,). `rows` None allows any number."""
    found = as_tensor(name, labels, "(n,)", error)
    if found.is_floating_point() and bool(((found == found.trunc()) & found.isfinite()).all()):
        found = found.long()  # numbers without a fractional part
    if found.is_floating_point() or found.is_complex() or found.ndim != 1 or rows not in (None, len(found)):
        count = "integers" if rows is None else f"{rows} integers"
        fix = " Give rows without a label -1 in place of NaN." * bool(found.isnan().any())
        raise error(f"{name} must be {count}, one per row, got {found.dtype} of shape {shape_of(found)}.{fix}")
    return found.long()


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
    return x.abs().amax() if x.numel() else x.new_zeros(()).abs()


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
    """Check the options of a function or constructor at every call, as an objective's constructor does."""
    signature, owner = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound, options = signature.bind(*args, **kwargs), options_of(function, function.__name__ == "__init__")
        except TypeError:
            return function(*args, **kwargs)  # Python's error, which has the function's name
        given = {option.name: bound.arguments[option.name] for option in options if option.name in bound.arguments}
        bound.arguments.update(checked(owner, options, given))
        return function(*bound.args, **bound.kwargs)

    return wrapped


def diagnostic(**metadata: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a diagnostic (`registry.register`), by default under the function's name, and check its options."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = metadata.pop("name", function.__name__)
        return register(name, kind="diagnostic", **metadata)(in_range(function))

    return decorate


@dataclass(frozen=True)
class ProbeData:
    """Labelled features of both parts, (n, d) and (m, d), at least in single precision, and numbers of their classes.

    test_y: (m,), -1 for a class that the training part lacks: always wrong. classes: (C,) the labels behind 0..C-1.
    """

    train_x: Tensor
    train_y: Tensor  # (n,) in 0..C-1
    test_x: Tensor
    test_y: Tensor
    classes: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "ProbeData":
        """Return the data with a function of the features of both parts."""
        return replace(self, train_x=function(self.train_x), test_x=function(self.test_x))


def check_features(x: Any, name: str) -> Tensor:
    """Return finite features (n, d), at least in single precision."""
    return finite_rows(full_precision(as_matrix(name, x, 0, DataError)), name)


def check_labels(y: Any, rows: int | None, device: torch.device, name: str) -> Tensor:
    """Return integer labels, one per row. `rows` None allows any number."""
    if y is None:
        raise DataError(f"{name} is missing: this probe needs labels. Use a labelled split or switch the probe off.")
    return as_classes(name, y, rows, DataError).to(device)


def split(train_x: Any, train_y: Any, test_x: Any, test_y: Any) -> ProbeData:
    """Return the labelled rows of both parts. Raises DataError if features or labels do not fit."""
    a, b = check_features(train_x, "train_x"), check_features(test_x, "test_x")
    if a.shape[1] != b.shape[1]:
        raise DataError(f"train_x has {a.shape[1]} features and test_x {b.shape[1]}; both must come from one encoder")
    b = b.to(a.device)
    p, q = check_labels(train_y, len(a), a.device, "train_y"), check_labels(test_y, len(b), b.device, "test_y")
    return known_classes(a[p >= 0], p[p >= 0], b[q >= 0], q[q >= 0])


def known_classes(train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor) -> ProbeData:
    """Number the classes of the training labels. Raises DataError for a part without labels, or a single class."""
    if not len(train_y) or not len(test_y):
        raise DataError(f"a probe needs labelled points to train and to test, got {len(train_y)} and {len(test_y)}")
    classes, train_y = train_y.unique(return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"a probe needs two classes or more; every training label is {int(classes[0])}")
    place = torch.searchsorted(classes, test_y).clamp_max(len(classes) - 1)
    return ProbeData(train_x, train_y, test_x, torch.where(classes[place] == test_y, place, -1), classes)


def single(data: ProbeData) -> ProbeData:
    """Return the features in single precision. Raises DataError if a value is too large for it."""
    data = data.mapped(Tensor.float)
    if not bool(data.train_x.isfinite().all() and data.test_x.isfinite().all()):
        raise DataError("the features are too large for float32: scale them, for example to unit length")
    return data


def standardized(data: ProbeData) -> ProbeData:
    """Scale each feature to zero mean and unit variance of the training part. Constant features become 0."""
    largest = size(data.train_x)
    data = data.mapped(lambda x: moderate(x, largest))
    mean, std = data.train_x.mean(0), data.train_x.std(0, correction=0)
    scale = torch.where(std > 1e-6 * std.max().clamp_min(1e-30), 1 / std, 0)
    return data.mapped(lambda x: (x - mean) * scale)
