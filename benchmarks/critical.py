"""Compare several methods over blocks: Friedman's test, Nemenyi's critical difference, performance profiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy import stats

from dipole.core.utils.errors import DataError

LEVEL = 0.05


@dataclass(frozen=True)
class CriticalDifference:
    """Mean ranks (1 is best, best first), Friedman's p, and the difference of mean ranks that would tell two apart.

    `groups` are the places (first, last) of rows without a significant difference: all, if Friedman's test finds none.
    """

    labels: tuple[str, ...]
    ranks: tuple[float, ...]
    blocks: int
    p: float
    difference: float
    groups: tuple[tuple[int, int], ...]


def critical_difference(blocks: Sequence[Mapping[str, float]], level: float = LEVEL) -> CriticalDifference:
    """Methods compared over N blocks, as Demsar (JMLR 2006, Sec. 3.2.2) does.

    Ranks r_ij inside each block, ties their mean. Friedman's Q = (k - 1) sum_j (sum_i d_ij)^2 / sum_ij d_ij^2 with
    d_ij = r_ij - (k + 1) / 2, which is corrected for ties, against chi^2 of k - 1 degrees of freedom. Then Nemenyi's
    CD = q sqrt(k (k + 1) / (6 N)), q the studentized range of k means over sqrt(2).

    Args:
        blocks: N >= 2 of them, each a value for the same k >= 2 methods, larger is better.

    Raises:
        DataError: too few, or a method is missing from a block.
    """
    labels = list(blocks[0]) if blocks else []
    if len(blocks) < 2 or len(labels) < 2 or any(set(block) != set(labels) for block in blocks):
        raise DataError("a critical difference needs two blocks or more with the same methods, two or more")
    # Values that differ in the last digits only are ties.
    values = np.array([[float(f"{block[label]:.10g}") for label in labels] for block in blocks])  # (N, k)
    ranks = stats.rankdata(-values, axis=1)
    n, k = ranks.shape
    off = ranks - (k + 1) / 2
    spread = float((off**2).sum())
    q = (k - 1) * float((off.sum(axis=0) ** 2).sum()) / spread if spread else 0.0
    p = float(stats.chi2.sf(q, k - 1))
    difference = float(stats.studentized_range.ppf(1 - level, k, np.inf)) / sqrt(2) * sqrt(k * (k + 1) / (6 * n))
    means = ranks.mean(axis=0)
    order = sorted(range(k), key=lambda j: (means[j], labels[j]))
    sorted_means = [float(means[j]) for j in order]
    groups = ((0, k - 1),) if p >= level else _groups(sorted_means, difference)
    return CriticalDifference(tuple(labels[j] for j in order), tuple(sorted_means), n, p, difference, groups)


def _groups(means: Sequence[float], difference: float) -> tuple[tuple[int, int], ...]:
    """Longest runs of sorted means that lie inside the difference. None of one row, none inside another."""
    found: list[tuple[int, int]] = []
    for first, mean in enumerate(means):
        last = max(i for i in range(first, len(means)) if means[i] - mean < difference)
        if last > first and not (found and found[-1][1] >= last):
            found.append((first, last))
    return tuple(found)


def performance_profile(tasks: Sequence[Mapping[str, Sequence[float]]], places: int = 51) -> dict[str, list[float]]:
    """Share of runs above tau, mean over tasks (Agarwal et al. 2021, Sec. 4.2), at `places` of tau from 0 to 1.

    tau is 0 at the worst run of a task and 1 at its best, so that tasks of different units weigh the same.

    Args:
        tasks: values of the runs of each method, larger is better. Methods that lack a task are left out.

    Raises:
        DataError: no task.
    """
    if not tasks:
        raise DataError("a performance profile needs a task or more")
    labels = [label for label in tasks[0] if all(task.get(label) for task in tasks)]
    taus = np.linspace(0, 1, places)
    shares: dict[str, list[float]] = {}
    scaled = []
    for task in tasks:
        every = [float(value) for label in labels for value in task[label]] or [0.0]
        low, high = min(every), max(every)
        scaled.append((low, (high - low) or 1.0))
    for label in labels:
        of = [
            (((np.asarray(task[label], dtype=np.float64) - low) / reach)[:, None] > taus).mean(axis=0)
            for task, (low, reach) in zip(tasks, scaled, strict=True)
        ]
        shares[label] = np.mean(of, axis=0).tolist()
    return shares
