"""Singular values of a matrix, and the number of directions it uses."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from dipole.core.objectives.similarity import full_precision

Result = TypeVar("Result")


def converged(decompose: Callable[[Tensor], Result], matrix: Tensor) -> Result:
    """Run a decomposition, and repeat it in double precision if single precision does not converge."""
    try:
        return decompose(matrix)
    except torch.linalg.LinAlgError:
        if matrix.dtype == torch.float64 or not bool(matrix.isfinite().all()):
            raise
        return decompose(matrix.double())


def singular_values(matrix: Tensor) -> Tensor:
    """Return singular values in descending order, at least in single precision, or all nan if a value is not finite."""
    wide = full_precision(matrix.detach())
    if not bool(wide.isfinite().all()):
        return wide.new_full((min(wide.shape),), float("nan"))
    found: Tensor = converged(torch.linalg.svdvals, wide).to(wide.dtype)
    return found


def effective_rank(matrix: Tensor, tolerance: float = 0.0) -> float:
    """Return exp(-sum_i p_i log p_i), p_i the shares of the singular values above a tolerance (Roy & Vetterli 2007).

    It is 0 if all singular values count as zero, and nan if a value is not finite.
    """
    values = singular_values(matrix).cpu().double()  # Apple's devices have no double precision
    if bool(values.isnan().any()):
        return float("nan")
    values = values[values > tolerance]
    if not len(values):
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def distance_from_identity(matrix: Tensor) -> float:
    """Return || L - c I || / || L ||, c = tr(L) / H: 0 for a multiple of the identity, nan for the zero matrix."""
    wide = full_precision(matrix.detach()).cpu().double()
    scaled = torch.eye(len(wide), dtype=wide.dtype, device=wide.device) * wide.diagonal().mean()
    return float(torch.linalg.matrix_norm(wide - scaled) / torch.linalg.matrix_norm(wide))
