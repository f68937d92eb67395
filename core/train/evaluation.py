"""What is measured on a frozen encoder: the domain's probes, and diagnostics that are the same in every domain."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dipole.core.contrast.gather import relate
from dipole.core.contrast.objective import SHARPNESS
from dipole.core.ground.seeding import Seeds, isolated
from dipole.core.measure import diagnostics
from dipole.core.record import Histogram, Number, finite

if TYPE_CHECKING:
    from dipole.core.contrast.objective import Composite
    from dipole.core.contrast.pairs import Pairs
    from dipole.core.train.adapter import Adapter

POINTS = 2000
"""At most this many test points enter the diagnostics, chosen by the probe stream."""


@dataclass(frozen=True)
class Evaluated:
    """Numbers of one evaluation."""

    results: dict[str, Number]
    diagnostics: dict[str, Number] = field(default_factory=dict)
    histogram: Histogram | None = None

    def as_metrics(self) -> dict[str, Number]:
        return {
            **{f"eval/{name}": value for name, value in self.results.items()},
            **{f"diag/{name}": value for name, value in self.diagnostics.items()},
        }


def evaluate(
    adapter: Adapter, objective: Composite | None, seeds: Seeds, pairs: tuple[Pairs, ...] | None = None
) -> Evaluated:
    """Probe and diagnose; the training state (mode, global generators) is left as it was.

    Args:
        adapter: the domain.
        objective: gives `transform`; None for a run without contrast.
        seeds: everything random is drawn from the `probe` stream.
        pairs: the last training batch, for diagnostics that need positives and negatives; default the adapter's.
    """
    modules = [module for module in (adapter.module, objective) if module is not None]
    modes = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with isolated(seeds.probe):
            results = finite(adapter.evaluate(objective))
            features, labels = adapter.features("test")
            values, histogram = diagnose(features, labels, objective, seeds)
            seen = adapter.diagnostic_pairs() if pairs is None else pairs
            if seen is not None:
                values |= diagnose_pairs(relate(seen).local_pairs, objective)
            if objective is not None:
                values |= diagnose_objective(objective)
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
    return Evaluated(results, finite(values), histogram)


@torch.no_grad()
def diagnose(
    features: Tensor, labels: Tensor | None, objective: Composite | None, seeds: Seeds
) -> tuple[dict[str, float], Histogram]:
    """Measure the geometry of frozen embeddings (n, d); a negative label means none."""
    if len(features) > POINTS:
        chosen = torch.from_numpy(seeds.numpy("probe", "points").permutation(len(features))[:POINTS])
        features, labels = features[chosen], None if labels is None else labels[chosen]
    features = features.float()
    if objective is not None:
        device = next(objective.parameters(), features).device
        features = objective.transform(features.to(device)).cpu()
    values = {
        "mean_distance": diagnostics.mean_distance(features),
        "margin_occupancy": diagnostics.margin_occupancy(features),
        "min_max_ratio": diagnostics.min_max_ratio(features),
        "rank": diagnostics.numerical_rank(features),
    }
    known = torch.zeros(len(features), dtype=torch.bool) if labels is None else labels >= 0
    found = diagnostics.distance_histogram(features)
    by_class = None
    if labels is not None and int(known.sum()) > 1:
        by_class = diagnostics.distance_histogram(features[known], labels[known])
        values["similarity_error"] = diagnostics.similarity_error(features[known], labels[known])[0]
    return values, Histogram(
        edges=found.edges.tolist(),
        all=found.all.tolist(),
        same=by_class.same.tolist() if by_class and by_class.same is not None else None,
        different=by_class.different.tolist() if by_class and by_class.different is not None else None,
    )


@torch.no_grad()
def diagnose_pairs(several: tuple[Pairs, ...], objective: Composite | None = None) -> dict[str, float]:
    """Measure one batch of positives and negatives; the mean over the Pairs that it gave.

    The entropy is that of the negatives' weights at the objective's own t_neg (`Composite.sharpness`).
    """
    t_neg = SHARPNESS[1] if objective is None else objective.sharpness()[1]
    found = [
        (*diagnostics.conditional_entropy(pairs, t_neg), diagnostics.alignment(pairs), diagnostics.uniformity(pairs))
        for pairs in several
    ]
    names = ("conditional_entropy", "conditional_entropy_maximum", "alignment", "uniformity")
    measured = {name: fmean(values) for name, values in zip(names, zip(*found, strict=True), strict=True)}
    return measured | {"conditional_entropy_t_neg": t_neg}


def diagnose_objective(objective: Composite) -> dict[str, float]:
    """Collect what the terms say about themselves (the rank of CLLR's L), as `<term>.<name>`."""
    return {
        f"{name}.{key}": value for name, _, term in objective for key, value in getattr(term, "summary", dict)().items()
    }
