"""Callbacks for SB3's `learn`: a contrastive objective, evaluations, checkpoints."""

from dipole.core.utils.extras import lazy

_HOME = {
    "CheckpointCallback": "dipole.rl.callbacks.checkpointing",
    "ContrastiveCallback": "dipole.rl.callbacks.contrastive",
    "EvaluationCallback": "dipole.rl.callbacks.evaluating",
}

__all__ = sorted(_HOME)
__getattr__ = lazy(__name__, _HOME, "rl")
