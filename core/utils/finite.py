"""The check of vectors that a score is computed from."""

from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted


def finite_rows(rows: Tensor, name: str, one: str = "row") -> Tensor:
    """Return the vectors (n, d) if they are finite. The ranks and counts of NaN look like those of a good encoder."""
    if rows.is_floating_point() and not bool(rows.isfinite().all()):
        bad = int((~rows.isfinite()).flatten(1).any(1).sum())
        raise DataError(
            f"{name}: {bad} of {counted(len(rows), one)} are not finite (NaN or infinity): the encoder has "
            "diverged, or a half float overflowed. Look at the run's loss, or encode in float32."
        )
    return rows
