"""Types of a command's arguments: what argparse says where a text is none of them."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from math import inf


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


def above_zero(what: str) -> Callable[[str], float]:
    """A finite number above 0; `what` is said of it where a text is none: "a number of hours above 0"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < inf:
            raise ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return read
