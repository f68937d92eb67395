"""Checks of arguments that a recipe's settings table checks by itself."""

from typing import Any, get_args

from dipole.core.utils.errors import OptionError, nearest


def check_momentum(momentum: float) -> None:
    """Raise OptionError unless a momentum is in [0, 1]."""
    if not 0 <= momentum <= 1:
        raise OptionError(f"momentum must be in [0, 1], got {momentum!r}.")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise OptionError unless an argument is one of the values of a `Literal`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise OptionError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.{nearest(str(value), allowed)}"
        )
