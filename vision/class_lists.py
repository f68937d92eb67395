"""Lists of class names: files with one name per line, and those that come with the published tables."""

from pathlib import Path

from dipole.core.train.shipped import shipped
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted


def shipped_classes() -> dict[str, Path]:
    """The class lists that come with the published tables, by name."""
    return {name.removesuffix("_classes"): path for name, path in shipped("published", "*_classes.txt").items()}


def read_classes(source: str) -> tuple[str, ...]:
    """The class names of a file, one per line, or of a shipped list such as imagenet100."""
    path = shipped_classes().get(source, Path(source))
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the class list {path} cannot be read: {error}.") from error
    names = tuple(line for line in lines if line and not line.startswith("#"))
    if len(set(names)) != len(names) or not names:
        raise DataError(
            f"the class list {path} must hold one different class name per line, got {counted(len(names), 'line')}."
        )
    return names
