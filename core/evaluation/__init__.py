"""Probes, diagnostics and theorems of embeddings. In Python it is also called `dipole.evaluation`.

Each name is imported on first use, so that importing this package loads no torch.
"""

from typing import TYPE_CHECKING

from dipole.core.utils.extras import lazy

if TYPE_CHECKING:
    from dipole.core.evaluation.diagnostics import alignment as alignment
    from dipole.core.evaluation.diagnostics import conditional_entropy as conditional_entropy
    from dipole.core.evaluation.diagnostics import distance_histogram as distance_histogram
    from dipole.core.evaluation.diagnostics import effective_rank as effective_rank
    from dipole.core.evaluation.diagnostics import margin_occupancy as margin_occupancy
    from dipole.core.evaluation.diagnostics import mean_distance as mean_distance
    from dipole.core.evaluation.diagnostics import mean_distance_ceiling as mean_distance_ceiling
    from dipole.core.evaluation.diagnostics import min_max_ratio as min_max_ratio
    from dipole.core.evaluation.diagnostics import mutual_information as mutual_information
    from dipole.core.evaluation.diagnostics import numerical_rank as numerical_rank
    from dipole.core.evaluation.diagnostics import pair_histogram as pair_histogram
    from dipole.core.evaluation.diagnostics import similarity_error as similarity_error
    from dipole.core.evaluation.diagnostics import uniformity as uniformity
    from dipole.core.evaluation.probes import ProbeResult as ProbeResult
    from dipole.core.evaluation.probes import few_shot_probe as few_shot_probe
    from dipole.core.evaluation.probes import kmeans_accuracy as kmeans_accuracy
    from dipole.core.evaluation.probes import knn_probe as knn_probe
    from dipole.core.evaluation.probes import linear_probe as linear_probe
    from dipole.core.evaluation.probes import mean_classifier as mean_classifier

_HOME, __getattr__, __dir__ = lazy(__name__, __file__, "")
__all__ = sorted(_HOME)
