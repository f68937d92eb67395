"""Sentence encoders trained on running text, and SentEval's tasks to judge any encoder by."""

from typing import TYPE_CHECKING

from dipole.core.ground.extras import lazy
from dipole.core.ground.moved import forward

if TYPE_CHECKING:
    from dipole.core.train.objective_callback import ObjectiveCallback
    from dipole.text.cached_contrastive_loss import CachedContrastiveLoss
    from dipole.text.contrastive_loss import ContrastiveLoss

_HOME = {
    "CachedContrastiveLoss": "dipole.text.cached_contrastive_loss",
    "ContrastiveLoss": "dipole.text.contrastive_loss",
    "ObjectiveCallback": "dipole.core.train.objective_callback",
}

__all__ = ["CachedContrastiveLoss", "ContrastiveLoss", "ObjectiveCallback"]
__getattr__ = lazy(__name__, _HOME, "sentence-transformers")

# Names of earlier versions.
forward(
    __name__,
    {
        "documents": "document_classification",
        "evaluation": "neighbours",
        "logistic": "dipole.core.measure.logistic",
        "probes": "senteval.protocols",
        "recurrent": "encoders.recurrent",
        "rows": "dipole.core.ground.rows",
        "relatedness": "senteval.relatedness",
        "senteval_tasks": "senteval.tasks",
        "stepped": "senteval.torch_classifier",
        "tables": "senteval.tables",
    },
)
