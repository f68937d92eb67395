"""Regularizers, added to a base objective with a weight, one file each; importing this package registers them."""

from dipole.core.utils.plugins import import_all

import_all(__name__)
