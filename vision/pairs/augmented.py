"""Views of the same image are positives."""

from dipole.vision.pairs.base import Kind


class Augmented(Kind):
    """Random augmentations of one image."""
