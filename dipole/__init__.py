"""Contrastive objectives and regularizers that run unchanged in vision, text and reinforcement learning.

Names are resolved on first use: importing this package loads neither torch nor any domain.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dipole.core.conformance.kit import check_objective
    from dipole.core.objectives.cached import cached
    from dipole.core.objectives.objective import Composite, Objective, Outcome, objective
    from dipole.core.objectives.pairs import Pairs
    from dipole.core.objectives.registry import register

__version__ = "0.1.0"

_HOME = {
    "cached": "dipole.core.objectives.cached",
    "Composite": "dipole.core.objectives.objective",
    "Objective": "dipole.core.objectives.objective",
    "Outcome": "dipole.core.objectives.objective",
    "objective": "dipole.core.objectives.objective",
    "Pairs": "dipole.core.objectives.pairs",
    "register": "dipole.core.objectives.registry",
    "check_objective": "dipole.core.conformance.kit",
    "compute_loss": "dipole.core.train.compute_loss",
}
_ROOMS = ("rl", "text", "vision")

__all__ = [
    "Composite",
    "Objective",
    "Outcome",
    "Pairs",
    "__version__",
    "cached",
    "check_objective",
    "compute_loss",
    "objective",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"dipole.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dipole' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
