"""Whole episodes: playing them, keeping their returns, scores and intervals, curves and videos."""

from typing import TYPE_CHECKING

from dipole.core.utils.extras import lazy

if TYPE_CHECKING:  # an alias marks an export
    from dipole.core.evaluation.intervals import interquartile_mean as interquartile_mean
    from dipole.rl.episodes.history import SCORES as SCORES
    from dipole.rl.episodes.history import Aggregate as Aggregate
    from dipole.rl.episodes.history import Evaluation as Evaluation
    from dipole.rl.episodes.history import aggregate as aggregate
    from dipole.rl.episodes.history import plot_curves as plot_curves
    from dipole.rl.episodes.history import read_evaluations as read_evaluations
    from dipole.rl.episodes.history import score_at as score_at
    from dipole.rl.episodes.history import scores as scores
    from dipole.rl.episodes.play import evaluate as evaluate
    from dipole.rl.episodes.play import write_video as write_video

_HOME, __getattr__, __dir__ = lazy(__name__, __file__, "rl")
__all__ = sorted(_HOME)
