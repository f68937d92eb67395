"""The regularizers again, as float64 loops written from their formulas (see `reference`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dipole.core.conformance.case import Case, Number, Vector, dot, dots, mean, ramp, total, unit


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
    return torch.linalg.eigvalsh(table @ table.T).sqrt()


def low_dimensional_reconstruction(
    case: Case, *, alpha: float, norm: str, solver: str = "subgradient", features: str = "raw",
    tolerance: float = 0.0, dim: int | None = None, variant: str = "printed", rank: int = 512,
) -> Number:  # fmt: skip
    """CLLR Eqs. 6-10: mean ||L^T L x - x||^2 + alpha norm(L), x before normalisation, or with features=unit after it.

    The proximal solver keeps the norm in the value and out of the gradient. The tolerance changes no value.
    variant=released: for each view the length of all its n(x) - n(L^T L n(x)) together, over the view's rows; the sum.
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
