"""What numbers the keywords of agents, environments and callbacks may be; NumPy's count as Python's do."""

from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np

from dipole.core.ground.errors import ConfigError


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's number, which is what gymnasium, SB3 and a setting's text take; all else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_seed(value: Any) -> bool:
    """Whether NumPy's generators take it; None draws one."""
    return value is None or (is_whole(value) and 0 <= value < 2**32)


SEED = "an integer from 0 to 2**32 - 1, or None"


def check_whole(low: int = 1, /, **options: Any) -> None:
    """Raise ConfigError unless every option is an integer of at least `low`."""
    for name, value in options.items():
        if not is_whole(value) or value < low:
            raise ConfigError(f"{name} must be an integer >= {low}, got {value!r}.")


def check_number(low: float, high: float, /, **options: Any) -> None:
    """Raise ConfigError unless every option is a number between the bounds, which are allowed."""
    for name, value in options.items():
        if not is_number(value) or not low <= value <= high:
            raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")


def check_seed(seed: Any) -> int | None:
    """Return the seed as Python's integer; raise ConfigError unless it is a seed."""
    if not is_seed(seed):
        raise ConfigError(f"seed must be {SEED}, got {seed!r}.")
    return None if seed is None else int(seed)
