"""The interquartile mean over seeds, and its bootstrap interval."""

from __future__ import annotations

from typing import TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dipole.core.utils.errors import ConfigError, DataError

Array: TypeAlias = NDArray[np.float64]


def interquartile_mean(values: ArrayLike) -> float:
    """Return the mean of the middle half of all values (Agarwal et al. 2021), without floor(n / 4) at each end.

    Args:
        values: (...), of which all count alike.

    Raises:
        DataError: there are no values, or one is not finite.
    """
    return float(_middle_half(as_sample(np.ravel(values))))


def bootstrap_interval(
    values: ArrayLike, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap percentile interval (Efron 1979) of the interquartile mean, or nan of a single value.

    Raise ConfigError for a confidence outside (0, 1), and DataError as `as_sample`.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    sample = as_sample(values)
    if len(sample) == 1:
        return float("nan"), float("nan")
    redrawn = sample[np.random.default_rng(seed).integers(0, len(sample), size=(draws, len(sample)))]
    low, high = np.quantile(_middle_half(redrawn), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def as_sample(values: ArrayLike) -> Array:
    """Return one sample (n,), n >= 1, of finite numbers. Raises DataError otherwise."""
    try:
        sample = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"a sample is a non-empty list of finite numbers, got {values!r}.") from error
    if sample.ndim != 1 or sample.size == 0:
        raise DataError(f"a sample is a non-empty list of finite numbers, got shape {sample.shape}.")
    if not np.isfinite(sample).all():
        raise DataError("a sample is a list of finite numbers, got nan or infinite values. Leave failed runs out.")
    return sample


def _middle_half(rows: Array) -> Array:
    """Interquartile mean along the last axis."""
    n = rows.shape[-1]
    low, high = n // 4, n - n // 4
    return cast(Array, np.partition(rows, (low, high - 1), axis=-1)[..., low:high].mean(axis=-1))
