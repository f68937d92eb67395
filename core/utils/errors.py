"""Errors that users can cause. The message says what is wrong, where, what is allowed and how to fix it."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

from dipole.core.utils.text import shortened

LONGEST = 1900


class DipoleError(Exception):
    """Base of all errors that commands show as one message without a traceback.

    `exit_code` is the exit code of the command. Long messages are shortened in the middle.
    """

    exit_code = 1

    def __str__(self) -> str:
        return shortened(super().__str__(), LONGEST)


class SpecError(DipoleError, ValueError):
    """An objective written as text cannot be parsed or built. Also a ValueError."""

    exit_code = 2


class RegistryError(DipoleError, ValueError):
    """A name is registered twice, or registered wrongly. Also a ValueError."""


class OptionError(DipoleError, ValueError):
    """An option or argument has the wrong type or is out of range. Also a ValueError.

    Args:
        message: what is wrong, and what is allowed.
        option: its name, for the caret in a text.
    """

    exit_code = 2

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


class PairsError(DipoleError, ValueError):
    """Embeddings or indices given to an objective do not fit together. Also a ValueError."""


class ConfigError(DipoleError, ValueError):
    """A recipe, a --set override or a setting is wrong. Also a ValueError."""

    exit_code = 2


class EngineError(DipoleError, RuntimeError):
    """The requested engine does not exist or cannot run here. Also a RuntimeError."""


class DataError(DipoleError, ValueError):
    """A data set is missing, empty or damaged. Also a ValueError."""


class ReceivedError(DataError):
    """A file cannot be read, is not a regular file, or has another format than its name says.

    Args:
        path: the file.
        reason: the message without the path.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{str(path)[:300]} {reason}")
        self.reason = reason


class TrainingError(DipoleError, RuntimeError):
    """Training cannot continue (a loss is not finite, a folder cannot be written). Also a RuntimeError."""


class CheckpointError(DipoleError, RuntimeError):
    """A checkpoint is missing, truncated or belongs to another run. Also a RuntimeError."""


class RecordError(DipoleError, ValueError):
    """A result record does not follow the schema. Also a ValueError."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the closest allowed name, or an empty string."""
    names = list(allowed)
    found = get_close_matches(name.lower(), dict.fromkeys(map(str.lower, names)), n=1, cutoff=0.6)
    if not found:
        return ""
    alike = [each for each in names if each.lower() == found[0]]  # torch has Tensor and tensor
    return f" Did you mean {get_close_matches(name, alike, n=1, cutoff=0)[0]!r}?"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


_public = (DipoleError, ReceivedError, *DipoleError.__subclasses__())
__all__ = sorted(each.__name__ for each in _public)
for _each in _public:
    _each.__module__ = "dipole"  # tracebacks then show the public name: dipole.SpecError
