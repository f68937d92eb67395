"""Argument parsing: wrong usage as an exception that names the nearest option, and types of arguments."""

import argparse
import inspect
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from dipole.core.utils.errors import nearest
from dipole.core.utils.text import screen_width

Runner = Callable[[argparse.Namespace], int]
Configure = Callable[[argparse.ArgumentParser], Runner]
WORDS: Final = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


class UsageError(Exception):
    """Wrong arguments. `shown` is printed and has the usage line, `message` has the problem alone."""

    def __init__(self, shown: str, message: str) -> None:
        super().__init__(message)
        self.shown, self.message = shown, message


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose `error` raises UsageError. The help ends with the examples of the command."""

    meant: Mapping[str, str] = MappingProxyType({})  # wrong choice -> hint

    def __init__(self, prog: str, description: str | None = None, **settings: Any) -> None:
        paragraphs = inspect.cleandoc(description or "").split("\n\n")
        examples = WORDS["examples"].get(prog.removeprefix("dipole "))
        super().__init__(
            prog,
            description="\n\n".join(textwrap.fill(each, screen_width()) for each in paragraphs) or None,
            epilog="\n  ".join(["examples:", *examples]) if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}", message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, odd = self.parse_known_args(args, namespace)
        if odd:
            hint = self._nearest_option(odd)
            if "--set" in self._option_string_actions:
                hint = _setting_hint(self, odd) or hint
            self.error(f"unrecognized arguments: {' '.join(odd)}{hint}")
        return found

    def _nearest_option(self, odd: Sequence[str]) -> str:
        first = odd[0].partition("=")[0]
        for action in self._actions:
            if action.option_strings and first in (action.choices or ()):
                return f". Did you mean '{action.option_strings[-1]} {first}'?"
        if first.startswith("--") and (found := nearest(first, self.options())):
            return f".{found}"
        return ""

    def options(self) -> Iterable[str]:
        """Return the long options."""
        return (option for option in self._option_string_actions if option.startswith("--"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            word = str(value).lower()
            near = self.meant.get(word) or nearest(word, known)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}.{near} Choose from {', '.join(known)}.")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write without hiding errors of a full disk, as argparse does."""
        (file or sys.stderr).write(message)


def add_overrides(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --set KEY=VALUE, stored as `overrides`. `what` is its help.

    If a user writes a setting as an option (--epochs 5), the error shows it with --set.
    """
    parser.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], dest="overrides", help=what
    )


def _setting_hint(parser: Parser, odd: Sequence[str]) -> str:
    from dipole.core.train.config import RunConfig, TrainConfig  # slow to import

    option, equals, value = odd[0].partition("=")
    if not option.startswith("--"):
        return f". A setting is given by --set {shlex.join(odd)}" * bool(equals and option[:1].isalpha())
    keys = {name: name for name in RunConfig.model_fields} | {n: f"train.{n}" for n in TrainConfig.model_fields}
    known = {f"--{name.replace('_', '-')}": key for name, key in keys.items()}
    taken = set(parser.options())
    near = get_close_matches(option, [*taken, *(known.keys() - taken)], n=1, cutoff=0.7)
    if not near or near[0] in taken:
        return ""
    value = value or next((each for each in odd[1:2] if not each.startswith("-")), "VALUE")
    return f". A setting is given by --set {known[near[0]]}={value}"


def resumable(run: Runner, kept: str = "finished runs and checkpoints are kept") -> Runner:
    """Return a runner whose message after Ctrl-C says how to continue."""

    def stoppable(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Repeat the command to continue: {kept}.") from None

    return stoppable


def add_runs(parser: argparse.ArgumentParser, meaning: str = "where hashes are looked up") -> None:
    """Add `--runs`, the folder of runs."""
    parser.add_argument("--runs", type=to_path, default=Path("runs"), metavar="DIR", help=meaning)


def to_path(text: str) -> Path:
    """Parse a path. Refuse an empty one, as from a variable without a value, and the - of standard output."""
    if not text:
        raise argparse.ArgumentTypeError("is empty. Name a file, or . for this folder")
    if text == "-":
        raise argparse.ArgumentTypeError("is not written to standard output. Name a file, or ./- for one of this name")
    return Path(text)


def checked_number(kind: Callable[[str], Any], fits: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """Return a parser of numbers that `fits` accepts. `what` names them in the error: "a number of hours above 0"."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return read


whole = checked_number(int, lambda value: value >= 0, "a whole number of at least 0")
positive = checked_number(int, lambda value: value >= 1, "a whole number of at least 1")


def above_zero(what: str) -> Callable[[str], float]:
    """Return a parser of finite numbers above 0. `what` names them in the error."""
    return checked_number(float, lambda value: 0 < value < inf, what)
