"""The order of images in an epoch."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dipole.core.utils.seeding import Seeds
from dipole.vision.decoding import Encoded
from dipole.vision.image_set import ImageSet


class Order(Protocol):
    """The order of images in an epoch: `len(order)` rows, of which `rows(epoch)` are the indices of images (n,)."""

    def __len__(self) -> int: ...

    def rows(self, epoch: int) -> Tensor | np.ndarray:
        """Return the indices of images in the order of an epoch, (n,).

        Args:
            epoch: its number, from 0.
        """


@dataclass(frozen=True)
class Shuffled:
    """Each of `count` images once in an epoch, in an order from the seed."""

    count: int
    seed: Seeds

    def __len__(self) -> int:
        return self.count

    def rows(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=self.seed.torch("data", "order", epoch))


@dataclass(frozen=True)
class ShardByShard:
    """Each image of a stream once in an epoch, nearly in the order of reading.

    The shards follow one another in a seeded order. Images are shuffled within windows of `buffer` images, whose start
    differs from epoch to epoch. The order is known before anything is read, so a run can resume anywhere.

    shard: (n,) of each image.
    """

    shard: Tensor
    buffer: int
    seed: Seeds

    def __len__(self) -> int:
        return len(self.shard)

    def rows(self, epoch: int) -> Tensor:
        generator = self.seed.torch("data", "order", epoch)
        turn = torch.randperm(int(self.shard.max()) + 1, generator=generator)
        order = turn[self.shard].argsort(stable=True)
        window = (torch.arange(len(order)) + torch.randint(self.buffer, (), generator=generator)) // self.buffer
        chance = torch.rand(len(order), generator=generator, dtype=torch.float64)
        return order[(window + chance).argsort()]


def image_order(images: ImageSet, seed: Seeds) -> Order:
    """Return the order of an epoch: shuffled, or for a stream one in which it can be read."""
    if images.stream is None:
        return Shuffled(len(images), seed)
    assert isinstance(images.images, Encoded)
    shard = torch.searchsorted(images.stream.bounds, images.images.rows, right=True) - 1
    return ShardByShard(shard, images.stream.buffer, seed)
