"""Similarities as inner products: each maps anchors and candidates to x and y with s_ij = x_i . y_j."""

from typing import Literal

import torch
from torch import Tensor

Similarity = Literal["cosine", "dot", "bilinear"]

_TINY = 1e-12


def full_precision(x: Tensor) -> Tensor:
    """Embeddings in single precision at least: those in float16 or bfloat16 as float32, all others as they are.

    Args:
        x: (...), of any shape.

    Returns:
        (...), the same tensor where nothing changes.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def normalize(x: Tensor) -> Tensor:
    """Rows of unit length, (n, d); a zero row stays zero and gets no gradient instead of an exploding one."""
    return x * lengths(x).reciprocal()  # a quotient takes longer in the backward pass


def lengths(x: Tensor) -> Tensor:
    """What rows are divided by to have unit length, (n, 1): infinity for a zero row."""
    return torch.threshold(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _TINY, torch.inf)


def unnormalized(grad: Tensor, unit: Tensor, length: Tensor) -> Tensor:
    """The gradient (n, d) of rows, written over that of the unit vectors they were normalised to, by their lengths."""
    return grad.addcmul_(unit, (grad * unit).sum(-1, keepdim=True), value=-1).div_(length)


class _PairedDot(torch.autograd.Function):
    """x_i . y_p for the listed p only, chunk by chunk, so that (A, K, d) never exists for large K."""

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
        if torch.is_grad_enabled():  # somebody will differentiate once more: nothing may be written in place
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
    """Similarities (A, K) of each anchor with the candidates listed for it; padding (-1) is read as candidate 0."""
    values: Tensor = _PairedDot.apply(x, y, index.clamp_min(0))  # type: ignore[no-untyped-call]
    return values
