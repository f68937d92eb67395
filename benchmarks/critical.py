"""Compare methods over blocks: Friedman's test, Nemenyi's critical difference, performance profiles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from dipole.benchmarks.statistics import LEVEL
from dipole.core.utils.errors import DataError


@dataclass(frozen=True)
class CriticalDifference:
    """Mean ranks (1 is best, best first), Friedman's p, and the smallest significant difference of mean ranks.

    `groups` are places (first, last) of methods without a significant difference. If Friedman's test is not
    significant, there is one group of all.
    """

    labels: tuple[str, ...]
    ranks: tuple[float, ...]
    blocks: int
    p: float
    difference: float
    groups: tuple[tuple[int, int], ...]


def critical_difference(blocks: Sequence[Mapping[str, float]]) -> CriticalDifference:
    """Compare methods over N blocks as Demsar (JMLR 2006, Sec. 3.2.2) does.

    r_ij are the ranks inside each block, with midranks for ties. Friedman's Q, corrected for ties, is
    (k - 1) sum_j (sum_i d_ij)^2 / sum_ij d_ij^2 with d_ij = r_ij - (k + 1) / 2. It is compared with chi^2 of k - 1
    degrees of freedom. Nemenyi's CD = q sqrt(k (k + 1) / (6 N)), with q the studentized range of k means over sqrt(2).

    `blocks` are N >= 2 mappings of the same k >= 2 methods to a value, larger is better. Raise DataError for fewer, or
    if a method is missing from a block.
    """
    if len(blocks) < 2 or len(blocks[0]) < 2 or any(set(block) != set(blocks[0]) for block in blocks):
        raise DataError("a critical difference needs two blocks or more with the same methods, two or more")
    from scipy import stats  # late: it takes a second

    labels = list(blocks[0])
    # Values that differ in the last digits only are ties.
    values = np.array([[float(f"{block[label]:.10g}") for label in labels] for block in blocks])  # (N, k)
    ranks = stats.rankdata(-values, axis=1)
    n, k = ranks.shape
    off = ranks - (k + 1) / 2
    p = 1.0
    if off.any():
        p = float(stats.chi2.sf((k - 1) * (off.sum(axis=0) ** 2).sum() / (off**2).sum(), k - 1))
    difference = float(stats.studentized_range.ppf(1 - LEVEL, k, np.inf)) / sqrt(2) * sqrt(k * (k + 1) / (6 * n))
    means = ranks.mean(axis=0)
    order = sorted(range(k), key=lambda j: (means[j], labels[j]))
    sorted_means = [float(means[j]) for j in order]
    groups: tuple[tuple[int, int], ...] = ((0, k - 1),)
    if p < LEVEL:
        groups = _groups(sorted_means, difference)
    return CriticalDifference(tuple(labels[j] for j in order), tuple(sorted_means), n, p, difference, groups)


def _groups(means: Sequence[float], difference: float) -> tuple[tuple[int, int], ...]:
    """Return the longest ranges of sorted means within the difference, none of one mean, none inside another."""
    found: list[tuple[int, int]] = []
    for first, mean in enumerate(means):
        last = max(i for i in range(first, len(means)) if means[i] - mean < difference)
        if last > first and not (found and found[-1][1] >= last):
            found.append((first, last))
    return tuple(found)


def performance_profile(tasks: Sequence[Mapping[str, Sequence[float]]], places: int = 51) -> dict[str, list[float]]:
    """Return the share of runs above tau, averaged over tasks (Agarwal et al. 2021, Sec. 4.2).

    tau is 0 at the worst run of a task and 1 at its best, at `places` equally spaced points, so tasks of different
    units have equal weight. `tasks` have the values of the runs of each method, larger is better. Methods without runs
    of a task are left out. Raise DataError for no task.
    """
    if not tasks:
        raise DataError("a performance profile needs a task or more")
    labels = [label for label in tasks[0] if all(task.get(label) for task in tasks)]
    taus = np.linspace(0, 1, places)
    above: dict[str, list[NDArray[np.float64]]] = {label: [] for label in labels}
    for task in tasks:
        every = [value for label in labels for value in task[label]] or [0.0]
        reach = (max(every) - min(every)) or 1.0
        for label in labels:
            scaled = (np.asarray(task[label], dtype=np.float64) - min(every)) / reach
            above[label].append((scaled[:, None] > taus).mean(axis=0))
    return {label: np.mean(shares, axis=0).tolist() for label, shares in above.items()}
