"""The parser of a command: wrong usage is an exception, told where all errors are, with the nearest name there is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from dipole.core.utils.errors import nearest


class UsageError(Exception):
    """Arguments that a command does not take; `shown` is what is printed of it, `message` what is wrong alone."""

    def __init__(self, shown: str, message: str) -> None:
        super().__init__(message)
        self.shown, self.message = shown, message


class Parser(argparse.ArgumentParser):
    """argparse's, whose `error` raises; parsers of subcommands are of the same kind.

    Attributes:
        cure_of: what to say of an option that there is none of, given all that was not recognized; "" for nothing.
    """

    cure_of: Callable[[Sequence[str]], str] | None = None

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}", message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, odd = self.parse_known_args(args, namespace)
        if odd:
            said = self.cure_of(odd) if self.cure_of is not None else ""
            self.error(f"unrecognized arguments: {' '.join(odd)}{said or self._near(odd)}")
        return found

    def _near(self, odd: Sequence[str]) -> str:
        first = odd[0].partition("=")[0]
        return f".{near}" if first.startswith("--") and (near := nearest(first, self.options())) else ""

    def options(self) -> Iterable[str]:
        """The long ones."""
        return (option for option in self._option_string_actions if option.startswith("--"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            near = nearest(str(value).lower(), known)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}.{near} Choose from {', '.join(known)}.")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own passes over what a full disk says."""
        (file or sys.stderr).write(message)
