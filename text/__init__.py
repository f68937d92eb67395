"""Sentence encoders trained on running text, and SentEval's tasks to judge any encoder by."""

from typing import TYPE_CHECKING

from dipole.core.utils.extras import lazy

if TYPE_CHECKING:
    from dipole.core.train.objective_callback import ObjectiveCallback as ObjectiveCallback
    from dipole.text import senteval as senteval
    from dipole.text.contrastive_loss import CachedContrastiveLoss as CachedContrastiveLoss
    from dipole.text.contrastive_loss import ContrastiveLoss as ContrastiveLoss
    from dipole.text.corpus import pydoc_documents as pydoc_documents

_HOME, __getattr__, __dir__ = lazy(__name__, __file__, "sentence-transformers")
__all__ = sorted(_HOME.keys() - {"senteval"})
