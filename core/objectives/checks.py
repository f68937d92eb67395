"""Check the shape, dtype and range of embeddings, indices, labels and weights before pairing."""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from dipole.core.utils.errors import PairsError, nearest
from dipole.core.utils.text import counted, shown


def check_tensor(name: str, x: Any, shape: str) -> Tensor:
    """Return a tensor that arithmetic works on: dense, with values, of a standard dtype. `shape` is for the message."""
    if not isinstance(x, Tensor):
        fix = " Convert it by torch.as_tensor." * isinstance(x, np.ndarray | list | tuple)
        raise PairsError(f"{name} must be a torch tensor of shape {shape}, got {type(x).__name__}.{fix}")
    kind = ""
    if is_lazy(x):
        kind, fix = "an uninitialized parameter", "run the module that it belongs to once"
    elif x.is_nested:
        kind, fix = "a nested tensor", "give rows of one length (torch.nested.to_padded_tensor)"
    elif hasattr(x, "to_local"):
        kind, fix = "a DTensor", "give the rows of this rank (.to_local()), or all on one rank (.full_tensor())"
    elif x.layout != torch.strided:
        kind, fix = f"a tensor of layout {x.layout}", "use .to_dense()"
    elif x.is_quantized:
        kind, fix = f"a quantized tensor ({x.dtype})", "use .dequantize()"
    elif has_no_values(x):
        kind, fix = "a tensor on the meta device, which has no values", "create it on a real device"
    elif x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        kind, fix = f"a tensor of {x.dtype}", "use .long()"
    elif x.dtype.itemsize == 1 and x.is_floating_point():
        kind, fix = f"a tensor of {x.dtype}", "use .to(torch.bfloat16)"
    if kind:
        raise PairsError(f"{name} must be a dense tensor of shape {shape}, got {kind}: {fix}.")
    return x


def has_no_values(x: Tensor) -> bool:
    """Return whether a tensor is on the meta device and no fake tensor of torch.compile or torch.export."""
    return x.is_meta and type(x) in (Tensor, Parameter)


def check_matrix(name: str, x: Tensor, like: tuple[str, Tensor] | None = None) -> Tensor:
    shape = "(rows >= 1, width >= 1)"
    check_tensor(name, x, shape)
    if x.ndim != 2 or not x.is_floating_point() or 0 in x.shape:
        got = f"{x.dtype} of shape {tuple(x.shape)}"
        fix = " Classes belong into Pairs.from_labels(embeddings, labels)." * (x.dtype == torch.long and x.ndim == 1)
        raise PairsError(f"{name} must be floating-point embeddings of shape {shape}, got {got}.{fix}")
    if like is not None:
        other, y = like
        for what, mine, theirs in (
            ("width", x.shape[1], y.shape[1]),
            ("device", x.device, y.device),
            ("dtype", x.dtype, y.dtype),
        ):
            if mine != theirs:
                raise PairsError(f"{name} and {other} must have the same {what}, got {mine} and {theirs}.")
    return x


def check_queue(queue: Tensor | None, like: tuple[str, Tensor]) -> int:
    """Check further candidates and return their number. An empty queue counts as None."""
    if queue is None:
        return 0
    check_tensor("queue", queue, "(rows, width)")
    if queue.ndim and not len(queue):
        return 0
    return len(check_matrix("queue", queue, like))


def as_views(given: Any, problem: str, fewest: int = 2) -> list[Tensor]:
    """Return views as a list. Raise PairsError(problem) unless it is a sequence of `fewest` or more."""
    if isinstance(given, (Tensor, str)) or not isinstance(given, Iterable):
        raise PairsError(f"{problem} Got {shape_of(given)}.")
    found = list(given)
    if len(found) < fewest:
        raise PairsError(f"{problem} Got {len(found)}.")
    return found


def check_alike(views: Sequence[Tensor], name: str = "views") -> None:
    check_matrix(f"{name}[0]", views[0])
    for number, view in enumerate(views[1:], 1):
        check_rows(f"{name}[{number}]", view, (f"{name}[0]", views[0]))


def check_rows(name: str, x: Tensor, like: tuple[str, Tensor]) -> None:
    """Check that a matrix has the shape, device and dtype of another."""
    check_matrix(name, x, like)
    other, y = like
    if len(x) != len(y):
        raise PairsError(f"{name} must have {counted(len(y), 'row')} like {other}, got {len(x)}.")


def reads_at_once(x: Tensor) -> bool:
    """Return whether a value can be read without waiting for an accelerator."""
    return x.device.type == "cpu"


def check_numbers(numbers: Tensor, low: int, high: int | None, problem: Callable[[int, int], str]) -> None:
    """Raise PairsError(problem(smallest, largest)) if an integer is not in low..high. CUDA stops without waiting."""
    if not numbers.numel():
        return
    if numbers.device.type in ("cuda", "meta"):
        inside = (numbers.clamp(low, high) == numbers).all()
        torch._assert_async(inside, f"a number is out of range; of one too small: {problem(low - 1, low - 1)}")
        return
    smallest, largest = int(numbers.min()), int(numbers.max())
    if smallest < low or (high is not None and largest > high):
        raise PairsError(problem(smallest, largest))


def check_count(name: str, value: Any, low: int, high: float = inf) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        allowed = f">= {low}" if high == inf else f"from {low} to {high}"
        raise PairsError(f"{name} must be an integer {allowed}, got {_shown(value)}.")


def check_choice(name: str, value: Any, *allowed: str) -> None:
    """Raise PairsError if a value is none of the words."""
    if not isinstance(value, str) or value not in allowed:
        *first, last = map(repr, allowed)
        hint = nearest(str(value)[:80], allowed)
        raise PairsError(f"{name} must be {', '.join(first)} or {last}, got {_shown(value)}.{hint}")


def check_flag(name: str, value: Any) -> None:
    """Raise PairsError if a value is not True or False. Tensors have no truth value, and often belong elsewhere."""
    if not isinstance(value, (bool, np.bool)):
        raise PairsError(f"{name} must be True or False, got {_shown(value)}. Give tensors by their names.")


def _shown(value: Any) -> str:
    if isinstance(value, (str, bool, int, float, type(None))):
        return shown(value)
    if isinstance(value, Tensor):
        return f"a tensor of {_dtype_and_shape(value)}"
    return f"a value of type {type(value).__name__}"


def check_index_shape(name: str, index: Tensor, anchors: Tensor) -> None:
    """Check the type, shape and device of indices, without reading their values."""
    shape = f"(anchors = {len(anchors)}, any)"
    check_tensor(name, index, shape)
    if index.dtype != torch.long or index.ndim != 2 or len(index) != len(anchors):
        raise PairsError(f"{name} must be torch.long of shape {shape}, got {_dtype_and_shape(index)}.")
    if index.device != anchors.device:
        raise PairsError(f"{name} and anchors must have the same device, got {index.device} and {anchors.device}.")


def check_indices(name: str, index: Tensor, anchors: Tensor, candidates: int) -> None:
    check_index_shape(name, index, anchors)

    def problem(low: int, high: int) -> str:
        allowed = f"(0 to {candidates - 1}, -1 pads)"
        return f"{name} must index the {candidates} candidates {allowed}, got {low} to {high}."

    check_numbers(index, -1, candidates - 1, problem)


def check_row_values(labels: Tensor | None, rows: int, name: str = "labels", of: str = "row") -> None:
    if labels is None:
        return
    check_tensor(name, labels, f"({rows},)")
    if labels.shape != (rows,) or labels.is_complex():
        raise PairsError(f"{name} must be a tensor of shape ({rows},), one for each {of}, got {shape_of(labels)}.")


def check_classes(labels: Tensor | None, rows: int, name: str = "labels") -> None:
    """Check that labels are integers, one for each row."""
    found = check_tensor(name, labels, f"({rows},)")
    if found.shape != (rows,) or found.is_floating_point() or found.dtype == torch.bool or found.is_complex():
        got = _dtype_and_shape(found)
        raise PairsError(f"{name} must be integers of shape ({rows},), the class of each row, got {got}.")


def shape_of(x: object) -> str:
    """Return the shape of a tensor, or the kind of anything else, for a message."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    if is_lazy(x):
        return "an uninitialized parameter"
    if x.is_nested:
        return "a nested tensor"
    return str(tuple(x.shape))


def _dtype_and_shape(x: Tensor) -> str:
    return f"{x.dtype} of shape {shape_of(x)}"


def check_weights(weights: Tensor, anchors: Tensor, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """Return weights in at least float32 on the anchors' device.

    `shapes` are the allowed ones, by the name for the message. Raises PairsError for another one, or for a weight
    that is negative, infinite or NaN. On CUDA a wrong value stops the device with the message, as reading it would
    wait.
    """
    allowed = " or ".join(f"{name} = {shape}" for name, shape in shapes.items())
    check_tensor("weights", weights, allowed)
    if weights.is_complex() or tuple(weights.shape) not in shapes.values():
        raise PairsError(f"weights must be real numbers in a tensor of shape {allowed}, got {shape_of(weights)}.")
    weights = weights.to(anchors.device, torch.promote_types(anchors.dtype, torch.float32))
    fine = (weights >= 0) & (weights < 1e30)  # whose sums are finite in float32
    if weights.device.type in ("cuda", "meta"):
        torch._assert_async(fine.all(), "weights must be finite and >= 0, below 1e30.")
    elif not bool(fine.all()):
        raise PairsError(f"weights must be finite and >= 0, below 1e30, got {weights[~fine][0].item():g}.")
    return weights


def by_instance(weights: Tensor, anchors: Tensor, positives: int | None, runs: int, batch: int) -> Tensor:
    """Return weights of the B instances, or of the A anchors run by run, with a row for each instance: (B, n) or (B,
    n, K).

    They can be gathered over ranks. `positives` is K. With None weights of pairs are refused.
    """
    count = len(anchors)
    sizes = {"A": count} if count == batch else {"B": batch, "A": count}
    shapes: dict[str, tuple[int, ...]] = {f"({name},)": (size,) for name, size in sizes.items()}
    if positives is not None:
        shapes |= {f"({name}, K)": (size, positives) for name, size in sizes.items()}
    weights = check_weights(weights, anchors, shapes)
    if len(weights) == batch:
        return weights.unsqueeze(1)
    found: Tensor = weights.unflatten(0, (runs, batch, -1)).transpose(0, 1).flatten(1, 2)
    return found


def by_anchor(rows: Tensor, count: int, runs: int) -> Tensor:
    """Return the weights of the `count` anchors, (A,) or (A, K), from those of `by_instance`."""
    batch = len(rows)
    each = rows.expand(batch, count // batch, *rows.shape[2:])
    found: Tensor = each.unflatten(1, (runs, -1)).transpose(0, 1).flatten(0, 2)
    return found
