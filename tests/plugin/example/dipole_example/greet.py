"""A command: its arguments, and what runs; torch and the like are imported when it runs."""

import argparse

from dipole.core.cli import Runner


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Greet somebody."""
    parser.add_argument("name", metavar="NAME")
    return run


def run(arguments: argparse.Namespace) -> int:
    print(f"hello {arguments.name}")
    return 0
