"""The base class of kinds of pairs."""

from torch import Tensor

from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import Parts, load
from dipole.vision.image_set import Images, ImageSet, Order, Shuffled
from dipole.vision.settings import VisionSettings
from dipole.vision.sources import missing


class PairKind:
    """A kind of pairs: by default the views of an image are positives."""

    suggests_frameworks: bool = True
    """True if a message may name frameworks that carry an objective on the same pairs."""

    def problems(self, config: VisionSettings) -> list[str]:
        """Describe settings that do not fit this kind."""
        return []

    def views(self, config: VisionSettings) -> int:
        """Return the default number of views of an image."""
        return 2

    def load(self, config: VisionSettings, seed: Seeds, validation: float = 0.0) -> Parts:
        """Read the images of a [vision] table. validation: share of those for training to test on instead."""
        return load(config.data, seed, validation)

    def missing(self, config: VisionSettings) -> list[str]:
        """Describe the sources of a [vision] table that are not there."""
        data = config.data
        sources = dict.fromkeys(filter(None, (data.source, data.test, data.pretrain)))
        return [problem for source in sources if (problem := missing(source))]

    def labels(self, images: ImageSet) -> Tensor | None:
        """Return the labels (n,) for training, or None if they are incomplete."""
        # Unlabelled images would look like one more class.
        return images.labels if images.all_labelled else None

    def columns(self, images: ImageSet) -> tuple[Images, ...]:
        """Return the images from which the first, second, ... view is made, in turn."""
        return (images.images,)


class LabelPairs(PairKind):
    """Images of one class."""

    suggests_frameworks = False

    def problems(self, config: VisionSettings) -> list[str]:
        if config.negatives is not None:
            return ["negatives has no effect with pairs 'labels': all views of other classes repel"]
        return []

    def labels(self, images: ImageSet) -> Tensor | None:
        return images.labels


def class_order(per_class: int | None, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
    """Return the order of an epoch: random, or groups of `per_class` images of a class."""
    labels = images.labels
    if labels is None or bool((labels < 0).all()):
        raise ConfigError(
            f"vision.pairs: 'labels' makes all of a class positives, and {images.name} has no labels. Take a labelled "
            "split, or pairs = 'augmented'."
        )
    if per_class is None:
        return Shuffled(len(images), seed)
    if not images.all_labelled:
        raise ConfigError(
            f"vision.images_per_class: {images.name} has images without a label. Take a labelled split, or "
            "leave it out."
        )
    if batch_size // world_size % per_class:
        raise ConfigError(
            f"train.batch_size: {batch_size} is no whole number of vision.images_per_class = {per_class} for each of "
            f"{world_size} processes. Give a multiple of {per_class * world_size}."
        )
    return ClassBlocks(labels.numpy(), per_class, None, seed)
