"""Contrastive objectives and regularizers that run unchanged in vision, text and reinforcement learning.

    objective, Composite, Outcome, Pairs, cached, compute_loss      use an objective
    register, Objective, Rows, Range, LogSumExp, ...                write one (docs/how-to/own-losses.md)
    check_objective, parametrize_with_checks, reference             test one
    load_recipe, train, find_run, load_run                          train a recipe, use a run
    Domain, Adapter, Settings, add_domain                           a domain of your own
    evaluation                                                      probes, diagnostics and theorems
    vision, text, rl                                                the three domains
    DipoleError, SpecError, PairsError, ...                         errors with one clear message each

Each name is imported when you first use it. Importing this package loads neither torch nor any domain.
"""

from importlib import import_module
from typing import Any

from dipole.core.utils.extras import lazy
from dipole.core.utils.version import __version__ as __version__

_MODULES = ("evaluation", "reference", "rl", "text", "vision")
_HOME, _resolve, _ = lazy(__name__, f"{__file__}i", "")  # the stub has each public name once, with its module
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"dipole.{name}")
    value = globals()[name] = _resolve(name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
