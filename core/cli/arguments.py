"""Types of a command's arguments: what argparse says where a text is none of them."""

from argparse import ArgumentTypeError


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
