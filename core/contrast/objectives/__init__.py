"""Base objectives, one file each; importing this package registers them."""

from dipole.core.contrast.objectives import (
    align_uniform,
    blocks,
    cacr,
    co2,
    cross_entropy,
    dcl,
    hcl,
    infonce,
    swav,
    triplet,
    tuple,
)

__all__ = [
    "align_uniform",
    "blocks",
    "cacr",
    "co2",
    "cross_entropy",
    "dcl",
    "hcl",
    "infonce",
    "swav",
    "triplet",
    "tuple",
]
