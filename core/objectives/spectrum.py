"""Singular values of a matrix, and the number of directions it uses."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from dipole.core.objectives.checks import check_numeric_matrix
from dipole.core.objectives.options import Range, in_range
from dipole.core.objectives.similarity import full_precision
from dipole.core.utils.finite import finite_rows

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
    """Return singular values in descending order, at least in single precision; nan if a value is not finite."""
    wide = full_precision(matrix.detach())
    if not bool(wide.isfinite().all()):
        return wide.new_full((min(wide.shape),), float("nan"))
    found: Tensor = converged(torch.linalg.svdvals, wide).to(wide.dtype)
    return found


@in_range
def effective_rank(
    matrix: Tensor, tolerance: Annotated[float, Range(at_least=0), "singular values not above it count as zero"] = 0.0
) -> float:
    """Number of directions in use, exp(-sum_i p_i log p_i) with p_i = sigma_i / sum_j sigma_j.

    The value is between 1 (one direction) and min(shape) (all directions alike). It is 0 if all singular values count
    as zero, and nan if a value is not finite.

    Roy & Vetterli 2007, "The effective rank: a measure of effective dimensionality", Sec. 2.

    Args:
        matrix: (m, n) of a floating dtype.
        tolerance: absolute threshold, >= 0. Singular values not above it count as zero.

    Raises:
        OptionError: `tolerance` is not a number >= 0.
        PairsError: `matrix` is no such tensor.
        torch.linalg.LinAlgError: the decomposition converges in neither single nor double precision.
    """
    check_numeric_matrix("matrix", matrix)
    values = singular_values(matrix).double()
    if bool(values.isnan().any()):
        return float("nan")
    values = values[values > tolerance]
    if not len(values):
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def distance_from_identity(matrix: Tensor) -> float:
    """Return || L - c I || / || L ||, c = tr(L) / H: 0 for a multiple of the identity, nan for the zero matrix."""
    wide = full_precision(matrix.detach()).double()
    scaled = torch.eye(len(wide), dtype=wide.dtype, device=wide.device) * wide.diagonal().mean()
    return float(torch.linalg.matrix_norm(wide - scaled) / torch.linalg.matrix_norm(wide))


def numerical_rank(matrix: Tensor, tolerance: float | None = None) -> int:
    """Return the number of singular values above a share of the largest.

    Args:
        matrix: (m, n) of a floating dtype.
        tolerance: that share, >= 0; default max(m, n) times the machine epsilon.

    Raises:
        PairsError: `matrix` is no such tensor.
        DataError: a value is not finite.
        torch.linalg.LinAlgError: the decomposition converges in neither single nor double precision.
    """
    check_numeric_matrix("matrix", matrix)
    wide = full_precision(finite_rows(matrix.detach(), "the matrix"))
    values = converged(torch.linalg.svdvals, wide).to(wide.real.dtype)
    if tolerance is None:
        tolerance = max(matrix.shape) * torch.finfo(values.dtype).eps
    if not values.numel():
        return 0
    return int((values > tolerance * values.amax()).sum())
