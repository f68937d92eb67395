"""Kinds of pairs: `PAIR_KINDS` maps the values of `text.pairs` to them."""

from dipole.text.pairs.base import PairKind, TextBatch
from dipole.text.pairs.columns import ColumnPairs
from dipole.text.pairs.running_text import BlockPairs, ViewPairs, WindowPairs, check_blocks

PAIR_KINDS: dict[str, type[PairKind]] = {kind.name: kind for kind in (WindowPairs, BlockPairs, ViewPairs, ColumnPairs)}

__all__ = ["PAIR_KINDS", "PairKind", "TextBatch", "check_blocks"]
