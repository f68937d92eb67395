"""Commands that go on where they were stopped, and say so."""

from __future__ import annotations

import argparse

from dipole.core.cli import Runner


def resumable(run: Runner, kept: str = "finished runs and checkpoints are kept") -> Runner:
    """A command that Ctrl-C ends with a word of how to go on; of others it does not hold."""

    def stoppable(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Repeat the command to continue: {kept}.") from None

    return stoppable
