"""Kinds of pairs, one file each: `PAIR_KINDS` maps the values of `text.pairs` to them."""

from dipole.text.pairs.base import PairKind, Setting, TextBatch
from dipole.text.pairs.blocks import Blocks, check_blocks
from dipole.text.pairs.columns import Columns
from dipole.text.pairs.views import Views
from dipole.text.pairs.window import Window

PAIR_KINDS: dict[str, type[PairKind]] = {kind.name: kind for kind in (Window, Blocks, Views, Columns)}

__all__ = ["PAIR_KINDS", "PairKind", "Setting", "TextBatch", "check_blocks"]
