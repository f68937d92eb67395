"""What the singular values of a matrix say about how many directions it uses."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from dipole.core.objectives.options import Range, in_range
from dipole.core.objectives.similarity import full_precision

Result = TypeVar("Result")


def converged(decompose: Callable[[Tensor], Result], matrix: Tensor) -> Result:
    """What a decomposition gives, in double precision where single precision does not converge.

    Raises:
        torch.linalg.LinAlgError: it converges in neither.
    """
    try:
        return decompose(matrix)
    except torch.linalg.LinAlgError:
        if matrix.dtype == torch.float64 or not bool(matrix.isfinite().all()):
            raise
        return decompose(matrix.double())


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values in falling order, in single precision at least; what is not finite has none that is.

    The decomposition of a matrix with values that are not finite may fail to converge; its answer here is nan.
    """
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

    Between 1 (one direction) and min(shape) (all alike); 0 for a matrix without any, nan where a value is not finite.
    Roy & Vetterli 2007, "The effective rank: a measure of effective dimensionality", Sec. 2.

    Args:
        matrix: (m, n) of a floating dtype.
        tolerance: singular values that are not above it, absolute, count as zero; >= 0.

    Raises:
        OptionError: `tolerance` is no number >= 0.
        torch.linalg.LinAlgError: the decomposition converges in neither single nor double precision.
    """
    values = singular_values(matrix).double()
    if bool(values.isnan().any()):
        return float("nan")
    values = values[values > tolerance]
    if not len(values):
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def distance_from_identity(matrix: Tensor) -> float:
    """|| L - c I || / || L || in Frobenius norms, c = tr(L) / H: 0 for a multiple of the identity, at most 1.

    Args:
        matrix: L, (H, H); nan where it is zero.
    """
    wide = full_precision(matrix.detach()).double()
    scaled = torch.eye(len(wide), dtype=wide.dtype, device=wide.device) * wide.diagonal().mean()
    return float(torch.linalg.matrix_norm(wide - scaled) / torch.linalg.matrix_norm(wide))
