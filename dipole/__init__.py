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

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from dipole.core.utils.version import __version__ as __version__

_MODULES = ("evaluation", "reference", "rl", "text", "vision")
# The stub has each public name once, with its module.
_IMPORTS = ast.walk(ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")))
_HOME = {each.names[0].name: str(each.module) for each in _IMPORTS if isinstance(each, ast.ImportFrom)}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"dipole.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dipole' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
