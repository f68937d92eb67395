"""The parser of a command: wrong usage is an exception, told where all errors are."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UsageError(Exception):
    """Arguments that a command does not take; `shown` is what is printed of it, `message` what is wrong alone."""

    def __init__(self, shown: str, message: str) -> None:
        super().__init__(message)
        self.shown, self.message = shown, message


class Parser(argparse.ArgumentParser):
    """argparse's, whose `error` raises; parsers of subcommands are of the same kind."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}", message)
