"""Contrastive objectives and regularizers that run unchanged in vision, text and reinforcement learning.

    objective, Composite, Outcome, Pairs, cached, compute_loss      use an objective
    register, Objective, Rows, Range, LogSumExp, ...                write one (docs/how-to/own-losses.md)
    check_objective, parametrize_with_checks, reference             test one
    evaluation                                                      probes, diagnostics and theorems
    vision, text, rl                                                the three domains
    DipoleError, SpecError, PairsError, ...                         errors with one clear message each

Each name is imported when you first use it. Importing this package loads neither torch nor any domain.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dipole.core.utils.version import __version__ as __version__

# isort: off
if TYPE_CHECKING:  # an alias marks an export
    from dipole.core.conformance.kit import (
        check_objective as check_objective,
        parametrize_with_checks as parametrize_with_checks,
    )
    from dipole.core.objectives.cached import cached as cached
    from dipole.core.objectives.objective import (
        Composite as Composite,
        Objective as Objective,
        Outcome as Outcome,
        Rows as Rows,
        objective as objective,
    )
    from dipole.core.objectives.options import (
        TEMPERATURE as TEMPERATURE,
        Range as Range,
    )
    from dipole.core.objectives.pairs import Pairs as Pairs
    from dipole.core.objectives.registry import register as register
    from dipole.core.objectives.similarity import full_precision as full_precision
    from dipole.core.objectives.statistics import (
        AnyStatistic as AnyStatistic,
        Between as Between,
        Count as Count,
        Extreme as Extreme,
        LearnedLogSumExp as LearnedLogSumExp,
        LearnedSoftplus as LearnedSoftplus,
        LogSumExp as LogSumExp,
        SoftmaxMean as SoftmaxMean,
        Softplus as Softplus,
        Statistic as Statistic,
        Sum as Sum,
    )
    from dipole.core.train.compute_loss import compute_loss as compute_loss
    from dipole.core.utils.errors import *  # noqa: F403
# isort: on

_EXPORTS = {
    "conformance.kit": "check_objective parametrize_with_checks",
    "objectives.cached": "cached",
    "objectives.objective": "Composite Objective Outcome Rows objective",
    "objectives.options": "Range TEMPERATURE",
    "objectives.pairs": "Pairs",
    "objectives.registry": "register",
    "objectives.similarity": "full_precision",
    "objectives.statistics": "AnyStatistic Between Count Extreme LearnedLogSumExp LearnedSoftplus LogSumExp "
    "SoftmaxMean Softplus Statistic Sum",
    "train.compute_loss": "compute_loss",
    "utils.errors": "CheckpointError ConfigError DataError DipoleError EngineError OptionError PairsError "
    "ReceivedError RecordError RegistryError SpecError TrainingError",
}
_HOME = {name: f"dipole.core.{module}" for module, names in _EXPORTS.items() for name in names.split()}
_MODULES = ("evaluation", "reference", "rl", "text", "vision")

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"dipole.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dipole' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
