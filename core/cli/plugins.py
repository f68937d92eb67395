"""What of installed packages cannot be used, found by loading it: for `dipole list` and `dipole doctor`."""

from __future__ import annotations

from dipole.core.utils.plugins import PluginError


def broken_plugins(kind: str) -> list[PluginError]:
    """The errors of one of the kinds of `ground.plugins.KINDS`."""
    if kind == "objectives":
        from dipole.core.objectives.registry import registry

        return list(registry.broken.values())
    if kind == "domains":
        from dipole.core.train.domains import broken_domains

        return broken_domains()
    if kind == "commands":
        from dipole.core.cli.app import broken_commands

        return broken_commands()
    from dipole.core.train.shipped import broken_folders

    return broken_folders(kind)
