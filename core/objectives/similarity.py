"""Similarities as inner products s_ij = x_i . y_j of mapped anchors x and candidates y."""

from typing import Literal

import torch
from torch import Tensor

Similarity = Literal["cosine", "dot", "bilinear"]

_TINY = 1e-12


def full_precision(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 embeddings to float32. Other dtypes stay as they are.

    Args:
        x: (...), of any shape.

    Returns:
        (...), the same tensor if nothing changes.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def normalize(x: Tensor) -> Tensor:
    """Scale rows to unit length, (n, d). A zero row stays zero and gets a zero gradient."""
    return x * lengths(x).reciprocal()  # a quotient takes longer in the backward pass


def lengths(x: Tensor) -> Tensor:
    """Return the lengths of rows, (n, 1), with infinity for a zero row."""
    return torch.threshold(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _TINY, torch.inf)


def unnormalized(grad: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """Return the gradient (n, d) of rows from that of their unit vectors. It overwrites `grad`."""
    return grad.addcmul_(unit, (grad * unit).sum(-1, keepdim=True), value=-1).div_(length)


class _PairedDot(torch.autograd.Function):
    """Compute x_i . y_p for the listed p in chunks, so that (A, K, d) never exists for large K."""

    CHUNK = 1 << 22  # entries of a gathered chunk

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor, index: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, y, index)
        out = x.new_empty(index.shape)
        for rows in _PairedDot.chunks(x, index):
            out[rows] = torch.einsum("ad,akd->ak", x[rows], y[index[rows]])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        x, y, index = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need operations that are not in place
            far = (grad.unsqueeze(2) * x.unsqueeze(1)).flatten(0, 1)
            return (grad.unsqueeze(2) * y[index]).sum(1), torch.zeros_like(y).index_add(0, index.flatten(), far), None
        dx, dy = torch.empty_like(x), torch.zeros_like(y)
        for rows in _PairedDot.chunks(x, index):
            near, g = index[rows], grad[rows]
            dx[rows] = torch.einsum("ak,akd->ad", g, y[near])
            dy.index_add_(0, near.reshape(-1), (g.unsqueeze(2) * x[rows].unsqueeze(1)).flatten(0, 1))
        return dx, dy, None

    @staticmethod
    def chunks(x: Tensor, index: Tensor) -> list[slice]:
        step = max(1, _PairedDot.CHUNK // max(1, index.shape[1] * x.shape[1]))
        return [slice(start, start + step) for start in range(0, len(index), step)]


def paired(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return similarities (A, K) of each anchor with its listed candidates. Padding (-1) is read as candidate 0."""
    values: Tensor = _PairedDot.apply(x, y, index.clamp_min(0))  # type: ignore[no-untyped-call]
    return values
