"""Domains by name."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, cast

from dipole.core.ground.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dipole.core.train.adapter import Adapter

# Strings, so that core imports no domain before a recipe asks for one.
DOMAINS = {
    "vision": "dipole.vision.adapter:VisionAdapter",
    "text": "dipole.text.adapter:TextAdapter",
    "rl": "dipole.rl.adapter:RLAdapter",
    "toy": "dipole.vision.toy:ToyAdapter",
}


def adapter_class(domain: str) -> type[Adapter]:
    """Import the adapter of a domain; ConfigError where the name is unknown or its packages are missing."""
    if domain not in DOMAINS:
        raise ConfigError(f"unknown domain {domain!r}.{nearest(domain, DOMAINS)} Allowed: {', '.join(DOMAINS)}.")
    module, _, attribute = DOMAINS[domain].partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dipole":
            raise
        raise ConfigError(
            f"domain {domain!r} needs the package {error.name!r}, which is not installed. "
            f"Install it with: pip install {json.dumps(f'dipole[{domain}]')}"
        ) from error
    return cast("type[Adapter]", found)
