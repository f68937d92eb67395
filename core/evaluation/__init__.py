"""Probes, diagnostics and theorems of embeddings. In Python it is also called `dipole.evaluation`.

Each name is imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dipole.core.evaluation.diagnostics import (
        alignment,
        conditional_entropy,
        distance_histogram,
        effective_rank,
        margin_occupancy,
        mean_distance,
        mean_distance_ceiling,
        min_max_ratio,
        mutual_information,
        numerical_rank,
        pair_histogram,
        similarity_error,
        uniformity,
    )
    from dipole.core.evaluation.probes import (
        ProbeResult,
        few_shot_probe,
        kmeans_accuracy,
        knn_probe,
        linear_probe,
        mean_classifier,
    )

_EXPORTS = {
    "diagnostics": (
        "alignment",
        "conditional_entropy",
        "distance_histogram",
        "effective_rank",
        "margin_occupancy",
        "mean_distance",
        "mean_distance_ceiling",
        "min_max_ratio",
        "mutual_information",
        "numerical_rank",
        "pair_histogram",
        "similarity_error",
        "uniformity",
    ),
    "probes": ("ProbeResult", "few_shot_probe", "kmeans_accuracy", "knn_probe", "linear_probe", "mean_classifier"),
}
_HOME = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "ProbeResult",
    "alignment",
    "conditional_entropy",
    "distance_histogram",
    "effective_rank",
    "few_shot_probe",
    "kmeans_accuracy",
    "knn_probe",
    "linear_probe",
    "margin_occupancy",
    "mean_classifier",
    "mean_distance",
    "mean_distance_ceiling",
    "min_max_ratio",
    "mutual_information",
    "numerical_rank",
    "pair_histogram",
    "similarity_error",
    "uniformity",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
