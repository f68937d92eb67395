"""Probes, diagnostics and the papers' theorems on plain arrays: `dipole.core.evaluation` by its public name."""

import sys
from importlib import import_module
from pkgutil import walk_packages

from dipole.core import evaluation

# The same modules under both names: a second copy would register its diagnostics twice.
for _module in walk_packages(evaluation.__path__, f"{evaluation.__name__}."):
    sys.modules[_module.name.replace("dipole.core.", "dipole.", 1)] = import_module(_module.name)
sys.modules[__name__] = evaluation
