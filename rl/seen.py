"""The layout of observations: one image, vectors of numbers, or both.

On torch, NumPy and gymnasium alone, as an exported folder holds a copy of this file.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


@dataclass(frozen=True)
class ObservationShape:
    """Key and shape (C, H, W) of an observation's image, and the shapes of its vectors by key, in their order.

    The key is "" if the observation is the image itself, and None without one, whose shape is then (0, 1, 1).
    """

    image: str | None
    shape: tuple[int, ...]
    vectors: dict[str, tuple[int, ...]]

    @property
    def widths(self) -> list[int]:
        """Numbers in each vector."""
        return [math.prod(each) for each in self.vectors.values()]

    @property
    def width(self) -> int:
        """Numbers in all vectors."""
        return sum(self.widths)

    @property
    def is_dictionary(self) -> bool:
        return "" not in (self.image, *self.vectors)

    def pixels(self, observation: Any) -> Any:
        """The images (n, C, H, W) of observations, arrays or tensors."""
        if self.image is not None:
            return observation if self.image == "" else observation[self.image]
        some = next(iter(self._vectors(observation)))
        return some[:, :0].reshape(len(some), *self.shape)

    def state(self, observation: Any) -> Any:
        """Return all vectors (n, width) of observations side by side."""
        found = self._vectors(observation)
        if not found:
            pixels = self.pixels(observation)
            return pixels.reshape(len(pixels), -1)[:, :0]
        if isinstance(found[0], Tensor):
            return torch.cat(found, 1)
        return np.concatenate(found, 1)

    def observation(self, pixels: Any, state: Any) -> Any:
        """Images (n, C, H, W) and vectors (n, width) as observations again."""
        if not self.is_dictionary:
            return pixels if self.image == "" else state.reshape(-1, *self.vectors[""])
        ends = np.cumsum(self.widths)
        found = {
            key: state[:, end - width : end].reshape(-1, *shape)
            for (key, shape), width, end in zip(self.vectors.items(), self.widths, ends, strict=True)
        }
        if self.image is None:
            return found
        return {**found, self.image: pixels}

    def _vectors(self, observation: Any) -> list[Any]:
        found = parts(observation)
        return [found[key].reshape(len(found[key]), -1) for key in self.vectors]


def parts(value: Any) -> dict[str, Any]:
    """Return the parts of an observation or a space by their keys. One that is no dictionary has the key ""."""
    if isinstance(value, spaces.Dict):
        return value.spaces
    if isinstance(value, dict):
        return value
    return {"": value}


def layout(space: spaces.Space[Any]) -> ObservationShape:
    """Return the layout of a Box of uint8 (C, H, W), another Box, or a Dict of these. Raise ValueError otherwise."""
    image, shape, vectors = None, (0, 1, 1), {}
    for key, each in parts(space).items():
        if isinstance(each, spaces.Box) and len(each.shape) == 3 and each.dtype == np.uint8:
            if image is not None:
                raise ValueError(f"{image!r} and {key!r} are both images")
            image, shape = key, each.shape
        elif (isinstance(each, spaces.Box) and len(each.shape) in (1, 2)) or isinstance(each, spaces.MultiBinary):
            vectors[key] = tuple(each.shape)
        else:
            raise ValueError(f"{key!r} is {each}".replace("'' is", "it is"))
    if image is None and not vectors:
        raise ValueError("it is empty")
    return ObservationShape(image, shape, vectors)


def joined(features: Tensor, state: Tensor) -> Tensor:
    """Join features of images (n, d) and vectors (n, width): what actor and critic see."""
    return torch.cat([features, state.to(features.dtype)], 1)
