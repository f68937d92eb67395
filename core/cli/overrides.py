"""`--set KEY=VALUE`, and what is said of a setting that was given as an option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial

from dipole.core.cli.parser import Parser


def add_overrides(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option, whose values are `overrides` of what is parsed; `what` is its help."""
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], dest="overrides", help=what
    )
    if isinstance(parser, Parser):
        parser.cure_of = partial(_cure, parser)


def _cure(parser: Parser, odd: Sequence[str]) -> str:
    """What to say of an option that the parser does not know and that a setting of every recipe is like."""
    from dipole.core.train.config import RunConfig, TrainConfig  # slow, and wanted where something is wrong

    option, _, value = odd[0].partition("=")
    if not option.startswith("--"):
        return ""
    keys = {name: name for name in RunConfig.model_fields} | {n: f"train.{n}" for n in TrainConfig.model_fields}
    known = {f"--{name.replace('_', '-')}": key for name, key in keys.items()}
    taken = set(parser.options())
    near = get_close_matches(option, [*taken, *(known.keys() - taken)], n=1, cutoff=0.7)
    if not near or near[0] in taken:
        return ""
    value = value or next((each for each in odd[1:2] if not each.startswith("-")), "VALUE")
    return f". A setting is given by --set {known[near[0]]}={value}"
