"""Frameworks, one file each (the folder is listed)."""

from dipole.core.utils.extras import needing
from dipole.core.utils.plugins import import_all

with needing("vision", __name__):
    from dipole.vision.frameworks.base import FRAMEWORKS, Framework

    import_all(__name__)

DEFAULT = "simclr"


def by_name() -> dict[str, type[Framework]]:
    """Return all frameworks: the default first, then those of several views per image, then those of one."""
    names = sorted(FRAMEWORKS, key=lambda name: (name != DEFAULT, bool(FRAMEWORKS[name].single), name))
    return {name: FRAMEWORKS[name] for name in names}
