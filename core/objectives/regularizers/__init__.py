"""Regularizers, added to a base objective with a weight, one file each. Importing this package registers them."""

from dipole.core.utils.plugins import import_all

import_all(__name__)
