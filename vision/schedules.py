"""The cosine schedule of a momentum or a learning rate."""

from __future__ import annotations

from dipole.core.train.schedule import SHAPES


def cosine_schedule(step: float, total: float, start: float, end: float) -> float:
    """Return the value at a step on a half cosine from `start` to `end`.

    With end = 1 it is the momentum of BYOL: 1 - (1 - start) (cos(pi k/K) + 1) / 2 at step k of K (Grill et al. 2020,
    Sec. 3.3).

        >>> [round(cosine_schedule(step, 100, 0.996, 1.0), 4) for step in (0, 50, 100)]
        [0.996, 0.998, 1.0]

    Args:
        step: from 0. After `total` the value is `end`.
        total: number of steps, > 0.
        start: value at step 0.
        end: value at step `total`.
    """
    return SHAPES["cosine"](start, end, min(step / total, 1.0))
