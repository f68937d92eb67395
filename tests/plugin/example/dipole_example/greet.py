"""A command: its arguments, and the function that runs. torch and the like are imported when it runs."""

import argparse
from collections.abc import Callable


def configure(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Greet somebody."""
    parser.add_argument("name", metavar="NAME")
    return run


def run(arguments: argparse.Namespace) -> int:
    print(f"hello {arguments.name}")
    return 0
