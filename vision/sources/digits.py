"""The digits that come with scikit-learn."""

import numpy as np
import torch

from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Classes, Decoding, Known, Source, register_source
from dipole.vision.sources.images import select


@register_source(names=("digits",), known={"digits": Known(1, 8, 10, {"train": 1797})})
def open_digits(source: str, options: Decoding, wanted: Classes) -> Source:
    return Source("digits", ("train",), lambda _: select(digits(), wanted))


def digits() -> ImageSet:
    """Load the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn (Alpaydin & Kaynak, UCI, 1998)."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(np.round(bunch.images * (255 / 16)).astype(np.uint8))[:, None]
    return ImageSet("digits", images, torch.from_numpy(bunch.target).long(), tuple(map(str, range(10))))
