"""Errors a user can cause: the message alone says what is wrong, where, what is allowed and how to cure it."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DipoleError",
    "EngineError",
    "OptionError",
    "PairsError",
    "ReceivedError",
    "RecordError",
    "RegistryError",
    "SpecError",
    "TrainingError",
]

LONGEST = 1900
"""Characters of a message that are shown."""


class DipoleError(Exception):
    """Base of every error that is shown as one message without a traceback; `exit_code` is then the command's.

    A message is for people: of one that is too long, as it quotes what somebody sent, both ends are shown.
    """

    exit_code = 1

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= LONGEST:
            return text
        first, last = LONGEST - 500, 400
        return f"{text[:first]} ... ({len(text) - first - last} characters more) ... {text[-last:]}"


class SpecError(DipoleError, ValueError):
    """An objective written as text cannot be parsed or built; a ValueError as well."""

    exit_code = 2


class RegistryError(DipoleError, ValueError):
    """A name is registered twice, or registered wrongly; a ValueError as well."""


class OptionError(DipoleError, ValueError):
    """An option or argument has the wrong type or lies outside its range; a ValueError as well.

    Args:
        message: what is wrong, and what is allowed.
        option: its name, for the caret in a text.
    """

    exit_code = 2

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


class PairsError(DipoleError, ValueError):
    """Embeddings or indices handed to an objective do not fit together; a ValueError as well."""


class ConfigError(DipoleError, ValueError):
    """A recipe, a --set override or a setting is wrong; a ValueError as well."""

    exit_code = 2


class EngineError(DipoleError, RuntimeError):
    """An engine was asked for that there is none of, or that cannot run here; a RuntimeError as well."""


class DataError(DipoleError, ValueError):
    """A data set is missing, empty or damaged; a ValueError as well."""


class ReceivedError(DataError):
    """A file cannot be read, is none, or is not what its name says; a DataError.

    Args:
        path: the file.
        reason: the message without the path.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{str(path)[:300]} {reason}")
        self.reason = reason


class TrainingError(DipoleError, RuntimeError):
    """Training cannot go on (a loss is not finite, a folder cannot be written); a RuntimeError as well."""


class CheckpointError(DipoleError, RuntimeError):
    """A checkpoint is missing, truncated or belongs to another run; a RuntimeError as well."""


class RecordError(DipoleError, ValueError):
    """A result record does not follow the schema; a ValueError as well."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the closest allowed name, or an empty string."""
    found = get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""
