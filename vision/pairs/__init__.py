"""Kinds of pairs (vision.pairs): which images are positives of each other."""

from dipole.vision.pairs.base import LabelPairs, PairKind
from dipole.vision.pairs.columns import ColumnPairs
from dipole.vision.settings import VisionSettings

PAIR_KINDS: dict[str, PairKind] = {"augmented": PairKind(), "labels": LabelPairs(), "columns": ColumnPairs()}


def kind_of(config: VisionSettings) -> PairKind:
    """Return the kind of pairs of a [vision] table."""
    return PAIR_KINDS[config.pairs]
