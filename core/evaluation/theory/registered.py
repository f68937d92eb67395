"""Importing this registers the diagnostics of the theorems (entry point `dipole.objectives`)."""

from dipole.core.evaluation.theory import arora, cllr, lmcl

__all__ = ["arora", "cllr", "lmcl"]
