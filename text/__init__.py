"""Sentence encoders trained on running text, and SentEval's tasks to judge any encoder by."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dipole.core.ground.errors import ConfigError
from dipole.core.ground.extras import install_line
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dipole.text' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("sentence_transformers", "transformers", "accelerate"):
            raise
        raise ConfigError(
            f"dipole.text.{name} needs {error.name}; install it with: {install_line('sentence-transformers')}"
        ) from error
