"""The features and labels that every probe starts from, checked."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dipole.core.evaluation.arrays import as_classes, as_matrix, as_tensor, moderate, size
from dipole.core.objectives.similarity import full_precision
from dipole.core.utils.errors import DataError
from dipole.core.utils.finite import finite_rows


@dataclass(frozen=True)
class ProbeLabels:
    """Labels of both parts as numbers of classes."""

    train_y: Tensor  # (n,) in 0..C-1
    test_y: Tensor  # (m,), -1 for a class that the training part lacks: always wrong
    classes: Tensor  # (C,) the labels behind 0..C-1


@dataclass(frozen=True)
class ProbeData(ProbeLabels):
    """Labelled features of both parts, (n, d) and (m, d), at least in single precision."""

    train_x: Tensor
    test_x: Tensor


def check_features(x: Any, name: str) -> Tensor:
    """Return finite features (n, d), at least in single precision."""
    tensor = as_tensor(name, x, "(n, d)", DataError)
    if tensor.ndim != 2:
        raise DataError(
            f"{name} has shape {tuple(tensor.shape)}; a probe takes features of shape (n, d), such as x.flatten(1)"
        )
    return finite_rows(full_precision(as_matrix(name, tensor, 0, DataError)), name)


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
    a, p = a[p >= 0], p[p >= 0]
    b, q = b[q >= 0], q[q >= 0]
    known = known_classes(p, q)
    return ProbeData(known.train_y, known.test_y, known.classes, a, b)


def known_classes(train_y: Tensor, test_y: Tensor) -> ProbeLabels:
    """Number the classes of the training labels. Raises DataError for a part without labels, or a single class."""
    if not len(train_y) or not len(test_y):
        raise DataError(
            "a probe needs labelled points in both parts, "
            f"got {len(train_y)} for training and {len(test_y)} for testing"
        )
    classes, train_y = train_y.unique(return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"a probe needs two classes or more; every training label is {int(classes[0])}")
    place = torch.searchsorted(classes, test_y).clamp_max(len(classes) - 1)
    return ProbeLabels(train_y, torch.where(classes[place] == test_y, place, -1), classes)


def single(data: ProbeData) -> ProbeData:
    """Return the features in single precision. Raises DataError if a value is too large for it."""
    a, b = data.train_x.float(), data.test_x.float()
    if not bool(a.isfinite().all() and b.isfinite().all()):
        raise DataError("the features are too large for float32: scale them, for example to unit length")
    return replace(data, train_x=a, test_x=b)


def standardized(data: ProbeData) -> ProbeData:
    """Scale each feature to zero mean and unit variance of the training part. Constant features become 0."""
    largest = size(data.train_x)
    a, b = moderate(data.train_x, largest), moderate(data.test_x, largest)
    mean, std = a.mean(0), a.std(0, correction=0)
    scale = torch.where(std > 1e-6 * std.max().clamp_min(1e-30), 1 / std, 0)
    return replace(data, train_x=(a - mean) * scale, test_x=(b - mean) * scale)
