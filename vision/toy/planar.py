"""The two sets of points in the plane of LMCL Section 5.1."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BAR_LENGTH, BAR_WIDTH, BAR_DISTANCE = 2.9, 0.5, 1.0
MOON_NOISE = 0.1


def three_bars(points: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw points uniformly in three parallel bars: (n, 2) float32 with mean 0, labels (n,) in 0..2.

    Bars of 2.9 x 0.5 with centre lines 1 apart: as wide as high, so that no direction has more variance. The paper
    shows them in Figure 3 without coordinates.
    """
    labels = np.arange(points) % 3
    along = rng.uniform(-BAR_LENGTH / 2, BAR_LENGTH / 2, points)
    across = (labels - 1) * BAR_DISTANCE + rng.uniform(-BAR_WIDTH / 2, BAR_WIDTH / 2, points)
    return _centred(np.stack([along, across], 1), labels)


def nested_moons(points: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw two interleaved half circles (scikit-learn's moons) with noise: as `three_bars`, labels 0..1."""
    labels = np.arange(points) % 2
    angle = rng.uniform(0, np.pi, points)
    upper = np.stack([np.cos(angle), np.sin(angle)], 1)
    lower = np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], 1)
    moons = np.where(labels[:, None] == 0, upper, lower) + MOON_NOISE * rng.normal(size=(points, 2))
    return _centred(moons, labels)


SETS: dict[str, Callable[[int, np.random.Generator], tuple[Tensor, Tensor]]] = {
    "three-bars": three_bars,
    "nested-moons": nested_moons,
}


def _centred(points: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    # Centred, because a linear map without bias rotates and stretches about the origin.
    return torch.from_numpy((points - points.mean(0)).astype(np.float32)), torch.from_numpy(labels)
