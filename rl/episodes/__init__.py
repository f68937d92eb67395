"""Whole episodes: playing them, keeping their returns, scores and intervals, curves and videos."""

from dipole.core.utils.extras import lazy

_HOME = {
    "SCORES": "dipole.rl.episodes.history",
    "Aggregate": "dipole.rl.episodes.history",
    "Evaluation": "dipole.rl.episodes.history",
    "aggregate": "dipole.rl.episodes.history",
    "evaluate": "dipole.rl.episodes.play",
    "interquartile_mean": "dipole.core.evaluation.intervals",
    "plot_curves": "dipole.rl.episodes.pictures",
    "read_evaluations": "dipole.rl.episodes.history",
    "score_at": "dipole.rl.episodes.history",
    "scores": "dipole.rl.episodes.history",
    "write_video": "dipole.rl.episodes.pictures",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy(__name__, _HOME, "rl")
