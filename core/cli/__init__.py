"""The command line: `main` finds a subcommand; `commands` holds those of core, a file each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dipole.core.cli.app import Configure, Runner

__all__ = ["Configure", "Runner", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words, without `dipole`; None: those that the process was given.

    Returns:
        Its exit code: 0 done, 1 failed, 2 wrong usage, 75 interrupted by a scheduler.
    """
    try:
        from dipole.core.cli.app import main as run  # here, so that Ctrl-C while it is imported is a word as well

        return run(argv)
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 1


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("dipole.core.cli.app"), name)
