"""Objectives without negatives and regularizers again, as float64 loops of their formulas (see `reference`)."""

import math
from collections.abc import Sequence

import torch

from dipole.core.conformance.case import (
    Case,
    Number,
    Vector,
    dot,
    dots,
    log_softmax,
    mean,
    ramp,
    squared_distances,
    total,
    unit,
)


def sinkhorn(scores: Sequence[Sequence[float]], epsilon: float, iterations: int) -> list[list[float]]:
    """Codes (B, P) whose rows sum to 1 and whose columns are balanced: rows and columns scaled in turn."""
    rows, columns = len(scores), len(scores[0])
    q = [[math.exp(s / epsilon) for s in row] for row in scores]
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
    scores = [dots(u, centres).tolist() for u in map(unit, case.candidates)]
    of = case.candidate_views if codes == "crop" else [0] * len(scores)
    targets: dict[int, list[float]] = {}
    for view in set(of):
        own = [j for j in range(len(scores)) if of[j] in (view, -1)]
        found = sinkhorn([scores[j] for j in own], epsilon, iterations)
        targets |= {j: q for j, q in zip(own, found, strict=True) if of[j] == view}
    losses = []
    for i in case.counted():
        log_prediction = log_softmax(dots(unit(case.anchors[i]), centres), temperature)
        losses += [-dot(torch.tensor(targets[p], dtype=torch.float64), log_prediction) for p in case.positives[i]]
    return mean(losses)


def regression(case: Case) -> Number:
    """Grill et al. 2020, Eq. 2: the squared distance of unit vectors."""
    case, losses = case.on_sphere(), []
    for i in case.counted():
        losses.append(mean(squared_distances(case.anchors[i], [case.candidates[p] for p in case.positives[i]])))
    return mean(losses)


def _deviations(rows: Sequence[Vector]) -> list[Vector]:
    """The columns of rows, each without its mean."""
    return [column - mean(column) for column in torch.stack(list(rows)).unbind(1)]


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
    """Bardes et al. 2022, Eqs. 1-6, distances over d as in Algorithm 1. Of V views, c is twice its mean.

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
        columns = _deviations(members)
        cov = [dots(a, columns) / max(1, len(members) - 1) for a in columns]
        hinges.append(mean([ramp(gamma - (cov[j][j] + epsilon).sqrt()) for j in range(width)]))
        squares.append(total(row.square().sum() - row[j] ** 2 for j, row in enumerate(cov)) / width)
    return (
        invariance * mean(near)
        + variance * (2 if reduction == "sum" else 1) * mean(hinges)
        + covariance * 2 * mean(squares)
    )


def barlow_twins(case: Case, *, redundancy: float) -> Number:
    """Zbontar et al. 2021, Eqs. 1-2, variance + 1e-5. Views and positives in turn, weighted by their rows."""
    summed, rows = [], 0
    for run in dict.fromkeys(case.anchor_runs):
        for place in range(max(map(len, case.positives))):
            mine = [i for i, own in enumerate(case.anchor_runs) if own == run and len(case.positives[i]) > place]
            if not mine:
                continue
            twins = [[case.anchors[i] for i in mine], [case.candidates[case.positives[i][place]] for i in mine]]
            columns = []
            for z in twins:
                columns.append([c / (mean(c * c) + 1e-5).sqrt() for c in _deviations(z)])
            off = []
            for j, a in enumerate(columns[0]):
                c = dots(a, columns[1]) / len(mine)
                off.append((1 - c[j]) ** 2 + redundancy * (c.square().sum() - c[j] ** 2))
            summed.append(len(mine) * total(off))
            rows += len(mine)
    return total(summed) / max(rows, 1)


def distance_polarization(case: Case, *, delta_pos: float, delta_neg: float, reduction: str = "mean") -> Number:
    """LMCL Eqs. 6-10: |min((D - delta_pos)(D - delta_neg), 0)| over all pairs of distinct instances."""
    case, sums, pairs = case.on_sphere(), [], 0
    for i in range(len(case.anchors)):
        others = case.negatives(i) + ([] if case.views else case.positives[i])
        pairs += len(others)
        d = (1 - dots(case.anchors[i], [case.candidates[j] for j in others])) / 2
        sums.append(total(ramp((d - delta_pos) * (delta_neg - d))))
    if reduction == "mean":
        return total(sums) / max(pairs, 1)
    if reduction == "sum":
        return total(sums)
    return mean(sums)


def singular_values(columns: Sequence[Vector]) -> Vector:
    """Singular values, the roots of the eigenvalues of the products of columns."""
    table = torch.stack(list(columns))
    roots: Vector = torch.linalg.eigvalsh(table @ table.T).clamp_min(0).sqrt()
    return roots


def low_dimensional_reconstruction(
    case: Case,
    *,
    alpha: float,
    norm: str,
    solver: str = "subgradient",
    features: str = "raw",
    tolerance: float = 0.0,
    dim: int | None = None,
    variant: str = "printed",
    rank: int = 512,
) -> Number:
    """CLLR Eqs. 6-10: mean ||L^T L x - x||^2 + alpha norm(L), x before normalisation, or with features=unit after it.

    The proximal solver keeps the norm in the value and out of the gradient. The tolerance changes no value.
    variant=released: the length of all n(x) - n(L^T L n(x)) of a view together, over its rows, summed over the views.
    """
    rows = case.parameters["L"]
    if variant == "released":
        views: dict[int, list[Vector]] = {}
        for embeddings, numbers, runs in (
            (case.anchors, case.anchor_views, case.anchor_runs),
            (case.candidates, case.candidate_views, case.candidate_views),
        ):
            for view in set(numbers) - set(views) - {-1}:
                first = runs[numbers.index(view)]  # a view may be the anchors of several other views
                views[view] = [unit(x) for x, run in zip(embeddings, runs, strict=True) if run == first]
        lengths = []
        for points in views.values():
            lost = [x - unit(torch.stack([row * dot(row, x) for row in rows]).sum(0)) for x in points]
            lengths.append(total(dot(each, each) for each in lost).sqrt() / len(points))
        return total(lengths)
    columns = [torch.stack([row[c] for row in rows]) for c in range(len(rows))]
    errors = []
    for anchor in case.anchors:
        x = anchor / dot(anchor, anchor).sqrt() if features == "unit" else anchor
        back = dots(dots(x, rows), columns)
        errors.append(dot(back - x, back - x))
    size = total(singular_values(columns) if norm == "nuclear" else [dot(c, c).sqrt() for c in columns])
    return mean(errors) + alpha * (size.detach() if solver == "proximal" else size)
