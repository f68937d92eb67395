"""Agents by the name that `rl.algorithm` has for them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dipole.rl.pixel_agent import PixelAgent

_HOME = {
    "sac": "dipole.rl.agent:ContrastiveSAC",
    "drq": "dipole.rl.drq:ContrastiveDrQ",
}


def find(name: str) -> "type[PixelAgent]":
    """The class of an algorithm."""
    module, _, attribute = _HOME[name].partition(":")
    found: type[PixelAgent] = getattr(import_module(module), attribute)
    return found
