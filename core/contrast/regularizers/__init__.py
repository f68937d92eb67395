"""Regularizers, added to a base objective with a weight; importing this package registers them."""

from dipole.core.contrast.regularizers import cllr, dp

__all__ = ["cllr", "dp"]
