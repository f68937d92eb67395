"""The rows of each view, for objectives that take statistics over a whole batch instead of over pairs."""

from torch import Tensor

from dipole.core.objectives.layout import NO_VIEW
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import full_precision


def rows_of_views(pairs: Pairs) -> list[Tensor]:
    """Return the rows (n, d) of every view among the candidates of all ranks, without the queue."""
    runs = pairs.known.candidate_views
    parts = full_precision(pairs.candidates).split([count for _, count in runs])
    return [rows for (view, _), rows in zip(runs, parts, strict=True) if view != NO_VIEW]
