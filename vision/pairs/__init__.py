"""Kinds of pairs (vision.pairs): which images are positives of each other."""

from dipole.vision.pairs.base import Kind, Labels
from dipole.vision.pairs.columns import Columns
from dipole.vision.settings import VisionSettings

PAIR_KINDS: dict[str, Kind] = {"augmented": Kind(), "labels": Labels(), "columns": Columns()}


def kind_of(config: VisionSettings) -> Kind:
    """Return the kind of pairs of a [vision] table."""
    return PAIR_KINDS[config.pairs]
