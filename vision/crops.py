"""Random views of numbered images, and the features of such views on which a linear probe is trained."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import prefetched, to_device
from dipole.vision.augment import AugmentConfig, apply_each, boxes, draw, draw_cropped
from dipole.vision.decoding import Box, Encoded

EVERY = slice(None)


def random_views(
    images: Tensor | Encoded,
    index: Tensor,
    recipes: Sequence[AugmentConfig],
    generator: torch.Generator,
    device: torch.device,
    mine: slice = EVERY,
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """A view of each image for each recipe, (b, C, size, size) in [0, 1].

    Parameters are drawn for the whole batch, so that any number of ranks sees the same views. Images in memory are
    cropped as they are there; of those that stay encoded each crop is cut from the image as it is stored.

    Args:
        images: (n, C, H, W). index: of the images of a batch over all ranks. mine: which of these are made. layout: in
            memory, of each view.
    """
    if isinstance(images, Tensor):
        pixels = to_device(images[index[mine]], device)
        height, width = images.shape[-2:]
        parameters = [draw(each, len(index), height, width, generator)[mine] for each in recipes]
        return apply_each(recipes, pixels, parameters, layout)
    sizes = [each.size or images.size for each in recipes]
    drawn = [draw_cropped(each, len(index), generator, size) for each, size in zip(recipes, sizes, strict=True)]
    chances = [each[mine] for _, each in drawn]

    def place(number: int, height: int, width: int) -> list[Box]:
        own = slice(number, number + 1)
        return [_box(boxes(each, some[own], height, width)) for each, some in zip(recipes, chances, strict=True)]

    cut = images.crops(index[mine], place, sizes)
    return [
        apply_each([each], to_device(pixels, device), [parameters[mine]], layout)[0]
        for each, pixels, (parameters, _) in zip(recipes, cut, drawn, strict=True)
    ]


def _box(box: Tensor) -> Box:
    top, left, height, width = map(int, box[0].tolist())
    return left, top, left + width, top + height


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
        for place, index in enumerate(batches):
            generator = self.seed.torch("probe", "crops", epoch, place)
            yield from random_views(self.images, index, [self.augment], generator, self.device)
