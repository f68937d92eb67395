"""The base class of kinds of pairs."""

from torch import Tensor

from dipole.core.utils.seeding import Seeds
from dipole.vision.data import Parts, load
from dipole.vision.image_set import Images, ImageSet
from dipole.vision.settings import VisionSettings
from dipole.vision.sources import missing


class Kind:
    """A kind of pairs: by default the views of an image are positives."""

    suggests_frameworks: bool = True
    """Whether another framework could carry an objective on the same pairs."""

    def problems(self, config: VisionSettings) -> list[str]:
        """Describe settings that do not fit this kind."""
        return []

    def views(self, config: VisionSettings) -> int:
        """Return the default number of views of an image."""
        return 2

    def load(self, config: VisionSettings, seed: Seeds, validation: float = 0.0) -> Parts:
        """Read the images of a [vision] table.

        validation: share of the training images to test on instead of the test images.
        """
        return load(config.data, seed, validation)

    def missing(self, config: VisionSettings) -> list[str]:
        """Describe the sources of a [vision] table that are not there."""
        data = config.data
        sources = dict.fromkeys(filter(None, (data.source, data.test, data.pretrain)))
        return [problem for source in sources if (problem := missing(source))]

    def labels(self, images: ImageSet) -> Tensor | None:
        """Return the labels (n,) for training; None if they are incomplete."""
        # Unlabelled images would look like one more class.
        return images.labels if images.all_labelled else None

    def columns(self, images: ImageSet) -> tuple[Images, ...]:
        """Return the images from which the first, second, ... view is made, in turn."""
        return (images.images,)
