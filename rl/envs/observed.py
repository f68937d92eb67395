"""Observations of the environments of this folder: pixels, their state as numbers, or both."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError, nearest

INPUTS = ("pixels", "state", "both")


def check_inputs(inputs: str) -> None:
    """Raise ConfigError for an unknown word."""
    if inputs not in INPUTS:
        near = nearest(str(inputs), INPUTS)
        raise ConfigError(f"inputs must be {', '.join(map(repr, INPUTS))}, got {inputs!r}.{near}")


def space_of(inputs: str, image: tuple[int, int, int], low: float, high: float, numbers: int) -> spaces.Space[Any]:
    """Return the space of an image (C, H, W), of a vector with bounds, or of a dictionary of both."""
    parts: dict[str, spaces.Space[Any]] = {
        "pixels": spaces.Box(0, 255, image, np.uint8),
        "state": spaces.Box(low, high, (numbers,), np.float32),
    }
    if inputs == "both":
        return spaces.Dict(parts)
    return parts[inputs]


def observed(inputs: str, pixels: Callable[[], NDArray[Any]], state: Callable[[], NDArray[Any]]) -> Any:
    """Return the requested parts of an observation."""
    if inputs == "both":
        return {"pixels": pixels(), "state": state()}
    if inputs == "pixels":
        return pixels()
    return state()
