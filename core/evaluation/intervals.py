"""Bootstrap intervals over seeds and tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dipole.core.utils.errors import ConfigError, DataError

Array: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Literal["mean", "iqm"] | Callable[[Array], Array]


def interquartile_mean(values: ArrayLike) -> float:
    """Return the mean of the middle half of all values (Agarwal et al. 2021), without floor(n / 4) at each end.

    Args:
        values: (...), of which all count alike.

    Raises:
        DataError: there are no values, or one is not finite.
    """
    return float(_middle_half(as_sample(np.ravel(values))))


def bootstrap_interval(
    values: Sequence[float] | Sequence[Sequence[float]] | Sequence[Array] | Array,
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a statistic (Efron 1979), or nan if no sample has two values.

    Several samples are stratified as in Agarwal et al. 2021 (rliable): each sample is redrawn separately, and the
    statistic is computed of all drawn values together.

    Args:
        values: one sample (n,), or several samples of any sizes.
        statistic: "mean", "iqm" (interquartile mean), or a function of redraws (R, n) -> (R,).
        confidence: of the interval, in (0, 1).
        draws: number of redraws R.
        seed: of the redraws.

    Raises:
        ConfigError: `confidence` lies outside its range, or the statistic has another name.
        DataError: a sample is empty or holds a value that is not finite.
    """
    if not callable(statistic) and statistic not in _STATISTICS:
        raise ConfigError(f"no statistic {statistic!r}. Allowed: {', '.join(_STATISTICS)}, or a function.")
    of_rows = statistic if callable(statistic) else _STATISTICS[statistic]
    is_nested = len(values) > 0 and np.ndim(cast(Any, values[0])) > 0
    samples = [as_sample(sample) for sample in (values if is_nested else [values])]
    generator = np.random.default_rng(seed)
    drawn = [x[generator.integers(0, len(x), size=(draws, len(x)))] for x in samples]
    if max(map(len, samples)) == 1:
        percentiles(np.zeros(1), confidence)
        return float("nan"), float("nan")
    return percentiles(of_rows(np.concatenate(drawn, axis=1)), confidence)


def percentiles(redrawn: Array, confidence: float) -> tuple[float, float]:
    """The middle `confidence` of a statistic's redraws (R,)."""
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must lie between 0 and 1, got {confidence!r}.")
    low, high = np.quantile(redrawn, [(1 - confidence) / 2, (1 + confidence) / 2])
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


def _mean(rows: Array) -> Array:
    return cast(Array, rows.mean(axis=-1))


def _middle_half(rows: Array) -> Array:
    """Interquartile mean along the last axis."""
    n = rows.shape[-1]
    low, high = n // 4, n - n // 4
    return cast(Array, np.partition(rows, (low, high - 1), axis=-1)[..., low:high].mean(axis=-1))


_STATISTICS: dict[str, Callable[[Array], Array]] = {"mean": _mean, "iqm": _middle_half}
