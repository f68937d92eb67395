"""Similarities s_ij = x_i . y_j: the precision and length of embeddings, and dot products with listed candidates."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Similarity = Literal["cosine", "dot", "bilinear"]

_TINY = 1e-12
# Matrices with fewer entries are formed as a whole. On a processor, tiles are 1.2 to 1.5 times as fast at this size,
# 4 MB in float32. On a GPU the whole matrix is twice as fast as kernels for 4,096 rows, and slower for 8,192.
LARGEST = 1 << 20
LARGEST_ON_GPU = (1 << 24) + 1


@dataclass(frozen=True)
class Factors:
    """The factors of a similarity matrix, s_ij = x_i . y_j."""

    x: Tensor  # (A, h) the anchors
    y: Tensor  # (C, h) the candidates, the same tensor if the anchors are the candidates
    bound: float | None = None  # upper bound of |x_i . y_j|. None if unknown
    # Rows that x and y are multiples of. In half precision their products are exact, so kernels multiply these and
    # scale the result.
    embeddings: tuple[Tensor, Tensor] | None = None

    def part(self, rows: slice, columns: slice) -> "Factors":
        """Return the factors of a part of the matrix."""
        embeddings = None
        if self.embeddings is not None:
            embeddings = self.embeddings[0][rows], self.embeddings[1][columns]
        return Factors(self.x[rows], self.y[columns], self.bound, embeddings)


def full_precision(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 embeddings to float32. Other dtypes stay as they are.

    Args:
        x: (...), of any shape.

    Returns:
        (...), the same tensor if nothing changes.

    Example:
        >>> dipole.full_precision(torch.zeros(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float()
    return x


def normalize(x: Tensor) -> Tensor:
    """Scale rows to unit length, (n, d). A zero row stays zero and gets a zero gradient."""
    lengths = torch.threshold(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _TINY, torch.inf)
    return x * lengths.reciprocal()  # a quotient takes longer in the backward pass


class _PairedDot(torch.autograd.Function):
    """Compute x_i . y_p for the listed p in chunks, so that (A, K, d) never exists for large K."""

    CHUNK = 1 << 22  # entries of a gathered chunk

    @staticmethod
    def forward(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        out = x.new_empty(index.shape)
        for rows in _PairedDot.chunks(x, index):
            out[rows] = torch.einsum("ad,akd->ak", x[rows], y[index[rows]])
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)  # apart from `forward`, as torch.func asks

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


def listed_similarities(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return similarities (A, K) of each anchor with its listed candidates. Padding (-1) is read as candidate 0."""
    values: Tensor = _PairedDot.apply(x, y, index.clamp_min(0))  # type: ignore[no-untyped-call]
    return values


def fits(anchors: int, candidates: int, device: torch.device) -> bool:
    """Return whether a matrix (A, C) is small enough to be formed as a whole on a device."""
    if device.type == "cuda":
        return anchors * candidates < LARGEST_ON_GPU
    return anchors * candidates < LARGEST
