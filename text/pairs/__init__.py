"""Kinds of pairs, one file each: `PAIR_KINDS` maps the values of `text.pairs` to them."""

from dipole.text.pairs.base import PairKind, RunForPairs, TextBatch
from dipole.text.pairs.blocks import BlockPairs, check_blocks
from dipole.text.pairs.columns import ColumnPairs
from dipole.text.pairs.views import ViewPairs
from dipole.text.pairs.window import WindowPairs

PAIR_KINDS: dict[str, type[PairKind]] = {kind.name: kind for kind in (WindowPairs, BlockPairs, ViewPairs, ColumnPairs)}

__all__ = ["PAIR_KINDS", "PairKind", "RunForPairs", "TextBatch", "check_blocks"]
