"""Evaluate a frozen encoder with the domain's probes, and diagnostics that are the same in every domain."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from dipole.core.evaluation import diagnostics
from dipole.core.evaluation.theory import arora
from dipole.core.evaluation.theory.latent import Latent, collision
from dipole.core.evaluation.theory.report import choose
from dipole.core.evaluation.theory.theorems import Choices
from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import SHARPNESS, Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.record import Histogram, Number, finite
from dipole.core.train.adapter import Adapter
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.seeding import Seeds, isolated

POINTS = 2000
"""Largest number of test points for the diagnostics, drawn from the probe stream."""
CLASS_POINTS = 500
"""Largest number of them for the losses over pairs of classes."""


@dataclass(frozen=True)
class Evaluated:
    """Results of one evaluation.

    Attributes:
        results: metrics of the task.
        diagnostics: numbers of the embeddings.
        histogram: distances of pairs, or None.
        remarks: on the data and the terms, for the record and the terminal.
    """

    results: dict[str, Number]
    diagnostics: dict[str, Number] = field(default_factory=dict)
    histogram: Histogram | None = None
    remarks: list[str] = field(default_factory=list)


def evaluate_model(
    adapter: Adapter, objective: Composite | None, seeds: Seeds, pair_values: Mapping[str, float] | None = None
) -> Evaluated:
    """Run probes and diagnostics, and leave the training state as it is.

    pair_values: `diagnose_pairs` of the last training batch. By default of the adapter's `diagnostic_pairs`.
    """
    with in_mode(False, adapter.module, objective), isolated(seeds.probe):
        results = finite(adapter.evaluate(objective))
        features, labels = adapter.features("test")
        if len(features) > POINTS:
            chosen = torch.from_numpy(seeds.numpy("probe", "points").permutation(len(features))[:POINTS])
            features = features[chosen]
            if labels is not None:
                labels = labels[chosen]
        features = features.float()
        values, histogram = diagnose(features, labels, objective)
        held_out = adapter.held_out_pairs(objective)
        if held_out is not None:
            shown = diagnostics.pair_histogram(held_out)
            results |= finite({"pair_error": shown.error})
            both = {"correct": shown.correct.tolist(), "incorrect": shown.incorrect.tolist()}
            histogram = Histogram(**histogram.model_dump() | both)
        if pair_values is not None:
            values |= pair_values
        else:
            with torch.no_grad():
                seen = adapter.diagnostic_pairs()
            if seen is not None:
                values |= diagnose_pairs(all_gather_pairs(seen).local_pairs, objective)
        notes = [*adapter.noticed()]
        if objective is not None:
            values |= diagnose_objective(objective, features)
            notes += [f"{name}: {text}" for name, _, term in objective for text in term.remarks()]
    return Evaluated(results, finite(values), histogram, notes)


def transformed(features: Tensor, objective: Composite | None) -> Tensor:
    """Return embeddings as the objective sees them, on their device."""
    if objective is None:
        return features
    device = next(objective.parameters(), features).device
    return objective.transform(features.to(device)).to(features.device)


@torch.no_grad()
def diagnose(
    features: Tensor, labels: Tensor | None, objective: Composite | None
) -> tuple[dict[str, float], Histogram]:
    """Measure the geometry of frozen embeddings (n, d). A negative label means none."""
    features = transformed(features, objective)
    labels = None if labels is None else labels.to(features.device)
    values = {
        "mean_distance": diagnostics.mean_distance(features),
        "margin_occupancy": diagnostics.margin_occupancy(features),
        "min_max_ratio": diagnostics.min_max_ratio(features),
        "rank": diagnostics.numerical_rank(features),
        "effective_rank": diagnostics.effective_rank(features),
    }
    if labels is not None and int((labels >= 0).sum()) < 2:
        labels = None
    found = diagnostics.distance_histogram(features, labels)
    if labels is not None:
        values["similarity_error"] = diagnostics.similarity_error(features, labels)[0]
        values |= diagnose_classes(features[labels >= 0], labels[labels >= 0])
    return values, Histogram(**{name: each.tolist() for name, each in vars(found).items() if each is not None})


def diagnose_classes(features: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute the terms of Arora's theorems (hinge, one negative) on at most `CLASS_POINTS` labelled points."""
    chosen = choose(labels, len(features), Choices(points=CLASS_POINTS))
    points = Latent.of(features[chosen], labels[chosen])
    if points.classes < 2:
        return {}
    return {
        "class_collision": collision(points.prior),
        "intraclass_deviation": arora.deviation(points),
        "unsupervised_loss": arora.unsupervised_loss(points).whole,
        "mean_classifier_loss": arora.mean_classifier_loss(points),
    }


@torch.no_grad()
def diagnose_pairs(several: tuple[Pairs, ...], objective: Composite | None = None) -> dict[str, float]:
    """Measure one batch, averaged over its Pairs. The entropy is at the objective's t_neg (`Composite.sharpness`)."""
    t_neg = SHARPNESS[1] if objective is None else objective.sharpness()[1]
    found = [
        (*diagnostics.entropy_of_weights(pairs, t_neg), diagnostics.alignment(pairs), diagnostics.uniformity(pairs))
        for pairs in several
    ]
    names = ("conditional_entropy", "conditional_entropy_maximum", "alignment", "uniformity")
    measured = {name: fmean(values) for name, values in zip(names, zip(*found, strict=True), strict=True)}
    return measured | {"conditional_entropy_t_neg": t_neg}


@torch.no_grad()
def diagnose_objective(objective: Composite, features: Tensor) -> dict[str, float]:
    """Collect the terms' diagnostics, with and without embeddings (n, d), as `<term>.<name>`."""
    return {
        f"{name}.{key}": value
        for name, _, term in objective
        for key, value in (term.summary() | term.measure(features)).items()
    }
