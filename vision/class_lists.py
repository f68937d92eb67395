"""Lists of class names: files with one name per line, and those that come with the published tables."""

import importlib.util
from pathlib import Path

from dipole.core.ground.errors import DataError


def shipped_classes() -> dict[str, Path]:
    """The class lists that come with the published tables, by name."""
    spec = importlib.util.find_spec("dipole.benchmarks")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder, "published").glob("*_classes.txt")]
    return {path.stem.removesuffix("_classes"): path for path in found}


def read_classes(source: str) -> tuple[str, ...]:
    """The class names of a file, one per line, or of a shipped list such as imagenet100."""
    path = shipped_classes().get(source, Path(source))
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the class list {path} cannot be read: {error}.") from error
    names = tuple(line for line in lines if line and not line.startswith("#"))
    if len(set(names)) != len(names) or not names:
        raise DataError(f"the class list {path} must hold one different class name per line, got {len(names)} lines.")
    return names
