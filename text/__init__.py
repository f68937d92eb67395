"""Sentence encoders trained on running text, and SentEval's tasks to judge any encoder by."""

from typing import TYPE_CHECKING

from dipole.core.utils.extras import lazy

if TYPE_CHECKING:
    from dipole.core.train.objective_callback import ObjectiveCallback as ObjectiveCallback
    from dipole.text import senteval as senteval
    from dipole.text.cached_contrastive_loss import CachedContrastiveLoss as CachedContrastiveLoss
    from dipole.text.contrastive_loss import ContrastiveLoss as ContrastiveLoss
    from dipole.text.corpus import pydoc_documents as pydoc_documents

_HOME = {
    "CachedContrastiveLoss": "dipole.text.cached_contrastive_loss",
    "ContrastiveLoss": "dipole.text.contrastive_loss",
    "ObjectiveCallback": "dipole.core.train.objective_callback",
    "pydoc_documents": "dipole.text.corpus",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy(__name__, _HOME | {"senteval": "dipole.text.senteval"}, "sentence-transformers")
