"""Random crops on which a linear probe is trained, and what a frozen network makes of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dipole.core.ground.seeding import Seeds
from dipole.core.ground.transfer import prefetched
from dipole.vision.augment import AugmentConfig, apply, draw
from dipole.vision.decoding import Encoded


@dataclass(frozen=True)
class Crops:
    """Features of random views of numbered images; called for an epoch and its batches.

    The views of a batch depend on (seed, epoch, place of the batch) alone and are drawn on the processor.

    images: (n, C, H, W); read: views (b, C, size, size) in [0, 1] -> features (b, d), without gradient.
    """

    images: Tensor | Encoded
    augment: AugmentConfig
    read: Callable[[Tensor], Tensor]
    seed: Seeds
    device: torch.device

    def __call__(self, epoch: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        views = self._views(epoch, batches)
        for view in prefetched(views) if isinstance(self.images, Encoded) else views:
            with torch.no_grad():
                features = self.read(view).flatten(1)
            yield features

    def _views(self, epoch: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        height, width = self.images.shape[-2:]
        for place, index in enumerate(batches):
            generator = self.seed.torch("probe", "crops", epoch, place)
            parameters = draw(self.augment, len(index), height, width, generator)
            yield apply(self.augment, self.images[index].to(self.device), parameters)
