"""A question before something that cannot be undone, or costs something."""

from __future__ import annotations

import sys

from dipole.core.utils.errors import ConfigError, DipoleError


class DeclinedError(DipoleError):
    """Somebody was asked, and did not say yes: nothing was done."""


def ask(question: str, purpose: str, nothing: str) -> None:
    """Ask on stderr, as stdout is the answer's; go on where the answer is yes.

    Args:
        question: without [y/N].
        purpose: what --yes is for: "say --yes to remove them".
        nothing: what is said where the answer is another: "nothing was removed".

    Raises:
        ConfigError: stdin is no terminal. DeclinedError: the answer is another, or Ctrl-C or Ctrl-D.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody is there to be asked; say --yes {purpose}.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    if answer.strip().lower() not in ("y", "yes"):
        raise DeclinedError(f"{nothing}.")
