"""The command line. `main` runs one command, and `commands` has a file for each."""

import sys
from collections.abc import Sequence

from dipole.core.cli.parser import Configure, Runner

__all__ = ["Configure", "Runner", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of one command: 0 done, 1 failed, 2 wrong usage, 75 interrupted by a scheduler.

    Args:
        argv: its words, without `dipole`. The default is those of the process.
    """
    try:
        from dipole.core.cli.app import main as run  # imported here, so that Ctrl-C meanwhile is caught too

        return run(argv)
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 1
