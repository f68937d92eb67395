"""The command line: `main` finds a subcommand; `commands` holds those of core, a file each."""

from dipole.core.cli.app import Configure, Runner, main

__all__ = ["Configure", "Runner", "main"]
