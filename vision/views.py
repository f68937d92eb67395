"""Random views of numbered images, in memory or encoded, and features of random crops for a linear probe."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import prefetched, to_device
from dipole.vision.augment import Augmentation, AugmentConfig
from dipole.vision.decoding import Box, Encoded

ALL = slice(None)


def random_views(
    images: Tensor | Encoded,
    index: Tensor,
    recipes: Sequence[AugmentConfig],
    generator: torch.Generator,
    device: torch.device,
    mine: slice = ALL,
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """Return one view (b, C, size, size) in [0, 1] of each image for each recipe.

    Parameters are drawn for the whole batch, so any number of ranks sees the same views. Encoded images are cropped at
    their stored resolution.

    Args:
        images: (n, C, H, W). index: of the images of a batch over all ranks. recipes: one per view. generator: on the
            CPU. device: of the views. mine: the part of the batch that this rank makes. layout: memory format.
    """
    augmentations = [Augmentation(each) for each in recipes]
    views = []
    if isinstance(images, Tensor):
        pixels = to_device(images[index[mine]], device)
        height, width = images.shape[-2:]
        for augment in augmentations:
            parameters = augment.draw(len(index), height, width, generator)[mine]
            views.append(augment.apply(pixels, parameters).contiguous(memory_format=layout))
        return views
    sizes = [each.size or images.size for each in recipes]
    drawn = [each.draw_unsized(len(index), generator, size) for each, size in zip(augmentations, sizes, strict=True)]
    crops = [each[mine] for _, each in drawn]

    def boxes(number: int, height: int, width: int) -> list[Box]:
        """Return the box of each view of the image at a place in the batch."""
        own = slice(number, number + 1)
        found = []
        for augment, draws in zip(augmentations, crops, strict=True):
            top, left, h, w = map(int, augment.boxes(draws[own], height, width)[0].tolist())
            found.append((left, top, left + w, top + h))
        return found

    pixels_of_views = images.crops(index[mine], boxes, sizes)
    for augment, pixels, (parameters, _) in zip(augmentations, pixels_of_views, drawn, strict=True):
        views.append(augment.apply(to_device(pixels, device), parameters[mine]).contiguous(memory_format=layout))
    return views


def crop_features(
    images: Tensor | Encoded,
    augment: AugmentConfig,
    read: Callable[[Tensor], Tensor],
    seed: Seeds,
    device: torch.device,
    epoch: int,
    batches: Sequence[Tensor],
) -> Iterator[Tensor]:
    """Yield the features (b, d) of random crops of each batch of numbered images, in an epoch of a probe.

    The crops of a batch depend only on (seed, epoch, place of the batch) and are drawn on the CPU.

    images: (n, C, H, W). read: views (b, C, size, size) in [0, 1] -> features.
    """

    def views() -> Iterator[Tensor]:
        for place, index in enumerate(batches):
            generator = seed.torch("probe", "crops", epoch, place)
            yield from random_views(images, index, [augment], generator, device)

    for view in prefetched(views()) if isinstance(images, Encoded) else views():
        with torch.no_grad():
            features = read(view).flatten(1)
        yield features
