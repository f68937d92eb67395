"""Scale sentence vectors."""

import numpy as np

from dipole.core.utils.errors import OptionError


def halves_normalised(features: np.ndarray, halves: int = 2) -> np.ndarray:
    """Scale each of `halves` equal parts of every row (n, d) to unit length. A zero part stays zero.

    Raises:
        OptionError: `halves` does not divide d.
    """
    if features.shape[1] % halves:
        raise OptionError(f"{features.shape[1]} features cannot be cut into {halves} equal parts")
    parts = features.reshape(len(features), halves, -1)
    norms = np.linalg.norm(parts, axis=2, keepdims=True)
    return (parts / np.where(norms > 0, norms, 1)).reshape(features.shape)
