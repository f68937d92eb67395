"""Objectives without negatives again, as float64 loops written from their formulas (see `reference`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dipole.core.conformance.case import (
    Case,
    Number,
    Vector,
    dot,
    log_softmax,
    mean,
    ramp,
    squared_distance,
    total,
    unit,
)


def sinkhorn(scores: Sequence[Sequence[float]], epsilon: float, iterations: int) -> list[list[float]]:
    """Codes (B, P) whose rows sum to 1 and whose columns are balanced: rows and columns scaled in turn."""
    rows, columns = len(scores), len(scores[0])
    q = [[float(torch.tensor(s / epsilon, dtype=torch.float64).exp()) for s in row] for row in scores]
    for _ in range(iterations):
        for p in range(columns):
            mass = sum(q[b][p] for b in range(rows))
            for b in range(rows):
                q[b][p] /= mass * columns
        for b in range(rows):
            mass = sum(q[b])
            q[b] = [value / (mass * rows) for value in q[b]]
    return [[value * rows for value in row] for row in q]


def swav(
    case: Case,
    *,
    prototypes: int,
    temperature: float,
    epsilon: float,
    iterations: int,
    dim: int | None = None,
    codes: str = "crop",
) -> Number:
    """Caron et al. 2020: an anchor's softmax over the prototypes predicts the codes of its positives, pairs alike."""
    centres = [unit(v) for v in case.parameters["prototypes"]]
    assert len(centres) == prototypes
    scores = [[dot(u, v).item() for v in centres] for u in map(unit, case.candidates)]
    of = case.candidate_views if codes == "crop" else [0] * len(scores)
    targets: dict[int, list[float]] = {}
    for view in set(of):
        own = [j for j in range(len(scores)) if of[j] in (view, -1)]
        found = sinkhorn([scores[j] for j in own], epsilon, iterations)
        targets |= {j: q for j, q in zip(own, found, strict=True) if of[j] == view}
    losses = []
    for i in case.counted():
        z = unit(case.anchors[i])
        log_prediction = log_softmax([dot(z, v) for v in centres], temperature)
        losses += [-total(q * x for q, x in zip(targets[p], log_prediction, strict=True)) for p in case.positives[i]]
    return mean(losses)


def regression(case: Case) -> Number:
    """Grill et al. 2020, Eq. 2: the squared distance of unit vectors."""
    case = case.on_sphere()
    return mean([mean([squared_distance(case.anchors[i], case.candidates[p]) for p in case.positives[i]])
                 for i in case.counted()])  # fmt: skip


def _deviations(column: Sequence[Number]) -> list[Number]:
    """Numbers without their mean."""
    middle = mean(column)
    return [x - middle for x in column]


def vicreg(
    case: Case,
    *,
    invariance: float,
    variance: float,
    covariance: float,
    gamma: float,
    epsilon: float,
    reduction: str = "mean",
) -> Number:
    """Bardes et al. 2022, Eqs. 1-6, distances over d as in Algorithm 1; of V views, twice the mean of c.

    The variance term is the mean over the views, or for reduction=sum twice the mean.
    """
    width = len(case.anchors[0])
    near = []
    for i in case.counted():
        gaps = [case.anchors[i] - case.candidates[p] for p in case.positives[i]]
        near.append(mean([dot(gap, gap) / width for gap in gaps]))
    rows: dict[int, list[Vector]] = {}
    for view, z in zip(case.candidate_views, case.candidates, strict=True):
        rows.setdefault(view, []).append(z)
    for view in set(case.anchor_views) - set(case.candidate_views):
        rows[view] = [z for own, z in zip(case.anchor_views, case.anchors, strict=True) if own == view]
    rows.pop(-1, None)
    hinges, squares = [], []
    for members in rows.values():
        columns = [_deviations([z[j] for z in members]) for j in range(width)]
        cov = [[total(x * y for x, y in zip(a, b, strict=True)) / max(1, len(members) - 1) for b in columns]
               for a in columns]  # fmt: skip
        hinges.append(mean([ramp(gamma - (cov[j][j] + epsilon).sqrt()) for j in range(width)]))
        squares.append(total(cov[j][k] ** 2 for j in range(width) for k in range(width) if j != k) / width)
    return (
        invariance * mean(near)
        + variance * (2 if reduction == "sum" else 1) * mean(hinges)
        + covariance * 2 * mean(squares)
    )


def barlow_twins(case: Case, *, redundancy: float) -> Number:
    """Zbontar et al. 2021, Eqs. 1-2, variance + 1e-5. Views and positives in turn, weighted by their rows."""
    width = len(case.anchors[0])
    summed, rows = [], 0
    for run in dict.fromkeys(case.anchor_runs):
        for place in range(max(map(len, case.positives))):
            mine = [i for i, own in enumerate(case.anchor_runs) if own == run and len(case.positives[i]) > place]
            if not mine:
                continue
            twins = [[case.anchors[i] for i in mine], [case.candidates[case.positives[i][place]] for i in mine]]
            columns = []
            for z in twins:
                centred = [_deviations([row[j] for row in z]) for j in range(width)]
                columns.append([[x / (mean([y * y for y in c]) + 1e-5).sqrt() for x in c] for c in centred])
            off = []
            for j, a in enumerate(columns[0]):
                for k, b in enumerate(columns[1]):
                    c = mean([x * y for x, y in zip(a, b, strict=True)])
                    off.append((1 - c) ** 2 if j == k else redundancy * c**2)
            summed.append(len(mine) * total(off))
            rows += len(mine)
    return total(summed) / max(rows, 1)
