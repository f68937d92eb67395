"""Frameworks, one file each (the folder is listed)."""

from typing import Any

from dipole.core.utils.extras import needing
from dipole.core.utils.plugins import import_all

with needing("vision", __name__):
    from dipole.vision.frameworks.base import FRAMEWORKS, Framework

    _files = import_all(__name__)

DEFAULT = "simclr"


def by_name() -> dict[str, type[Framework]]:
    """Return all frameworks: the default first, then those of several views per image, then those of one."""
    names = sorted(FRAMEWORKS, key=lambda name: (name != DEFAULT, bool(FRAMEWORKS[name].single), name))
    return {name: FRAMEWORKS[name] for name in names}


def __getattr__(name: str) -> Any:
    """Return what one of the files defines: `dipole.vision.frameworks.MoCo`."""
    for file in _files.values():
        if not name.startswith("_") and hasattr(file, name):
            return getattr(file, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
