"""Probes, diagnostics and the papers' theorems on plain arrays: `dipole.core.evaluation` by its public name."""

import sys
from importlib import import_module
from pkgutil import iter_modules

from dipole.core import evaluation

# The same modules under both names: a second copy would register its diagnostics twice.
for _module in iter_modules(evaluation.__path__):
    sys.modules[f"{__name__}.{_module.name}"] = import_module(f"dipole.core.evaluation.{_module.name}")
sys.modules[__name__] = evaluation
