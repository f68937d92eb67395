"""Checks of arguments of environments, callbacks and functions. `settings.py` checks the agent's settings."""

from numbers import Integral, Real
from typing import Any

import numpy as np

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.text import shortened


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number, lists and arrays as tuples, and anything else unchanged."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_integers(low: int = 1, /, **options: Any) -> None:
    """Raise ConfigError unless every option is an integer of at least `low`."""
    for name, value in options.items():
        if not _is(Integral, value) or value < low:
            raise ConfigError(f"{name} must be an integer >= {low}, got {shortened(repr(value), 80)}.")


def check_number(low: float, high: float, /, **options: Any) -> None:
    """Raise ConfigError unless every option is a number between the bounds, which are allowed."""
    for name, value in options.items():
        if not _is(Real, value) or not low <= value <= high:
            raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {shortened(repr(value), 80)}.")


def check_seed(seed: Any) -> int | None:
    """Return the seed as an int. Raise ConfigError unless NumPy accepts it (None draws one)."""
    if seed is None:
        return None
    if not _is(Integral, seed) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be an integer from 0 to 2**32 - 1, or None, got {seed!r}.")
    return int(seed)
