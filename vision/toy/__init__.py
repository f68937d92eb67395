"""LMCL's toy study (Sec. 5.1) as a domain."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`dipole.vision.toy.ToyAdapter`, imported on access."""
    if name in ("ToyAdapter", "ToyConfig"):
        from dipole.vision.toy import adapter

        return getattr(adapter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
