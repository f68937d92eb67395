"""All views of all images of a class are positives (supervised contrast, Khosla et al. 2020)."""

from torch import Tensor

from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.vision.image_set import ImageSet
from dipole.vision.order import Order, Shuffled
from dipole.vision.pairs.base import Kind
from dipole.vision.settings import VisionSettings


class Labels(Kind):
    """Images of one class."""

    suggests_frameworks = False

    def problems(self, config: VisionSettings) -> list[str]:
        if config.negatives is not None:
            return ["negatives has no effect with pairs 'labels': all views of other classes repel"]
        return []

    def labels(self, images: ImageSet) -> Tensor | None:
        return images.labels


def class_order(per_class: int | None, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
    """Return the order of an epoch: random, or groups of `per_class` images of a class.

    Raises:
        ConfigError: no image has a label, or the batch is no multiple of `per_class`.
    """
    labels = images.labels
    if labels is None or bool((labels < 0).all()):
        raise ConfigError(
            f"vision.pairs: 'labels' makes all of a class positives, and {images.name} has no labels; take a labelled "
            "split, or pairs = 'augmented'."
        )
    if per_class is None:
        return Shuffled(len(images), seed)
    if not images.all_labelled:
        raise ConfigError(
            f"vision.images_per_class: {images.name} has images without a label; take a labelled split, or "
            "leave it out."
        )
    if batch_size // world_size % per_class:
        raise ConfigError(
            f"train.batch_size: {batch_size} is no whole number of vision.images_per_class = {per_class} for each of "
            f"{world_size} processes; give a multiple of {per_class * world_size}."
        )
    return ClassBlocks(labels.numpy(), per_class, None, seed)
