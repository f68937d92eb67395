"""Weights of anchors, (A,), or of their positives, (A, K): checks and layout. `Rows` averages with them."""

import torch
from torch import Tensor

from dipole.core.objectives.checks import check_tensor, shape_of
from dipole.core.utils.errors import PairsError


def checked(weights: Tensor, anchors: Tensor, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """Return weights in at least float32 on the anchors' device.

    `shapes` are the allowed ones, by the name for the message. Raises PairsError for another one, or for a weight
    that is negative, infinite or NaN. On CUDA a wrong value stops the device with the message, as reading it would
    wait.
    """
    if isinstance(weights, Tensor):
        check_tensor("weights", weights, " or ".join(shapes))
    if not isinstance(weights, Tensor) or weights.is_complex() or tuple(weights.shape) not in shapes.values():
        allowed = " or ".join(f"{name} = {shape}" for name, shape in shapes.items())
        raise PairsError(f"weights must be a tensor of shape {allowed}, got {shape_of(weights)}.")
    weights = weights.to(anchors.device, torch.promote_types(anchors.dtype, torch.float32))
    fine = (weights >= 0) & weights.isfinite()
    if weights.device.type in ("cuda", "meta"):
        torch._assert_async(fine.all(), "weights must be finite and >= 0.")
    elif not bool(fine.all()):
        raise PairsError(f"weights must be finite and >= 0, got {weights[~fine][0].item():g}.")
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
    weights = checked(weights, anchors, shapes)
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


def weighted_mean(values: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Return sum w v / sum w along a dimension, and 0 where all weights are 0."""
    return (values * weights).sum(dim) / or_one(weights.sum(dim))


def or_one(total: Tensor) -> Tensor:
    """Return a sum of weights >= 0 to divide by: 1 where it is 0."""
    return torch.where(total > 0, total, 1)
