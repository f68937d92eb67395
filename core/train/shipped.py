"""Files that come with an installed package: recipes, suites, published tables.

A package names its folder by an entry point. The package is not imported:

    [project.entry-points."dipole.recipes"]
    mine = "my_package:recipes"
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path

from dipole.core.utils.plugins import PluginError, points


def shipped(kind: str, pattern: str = "*.toml") -> dict[str, Path]:
    """Return the files of a kind (recipes, suites, published) by name, the file name without suffix.

    If two packages have a file of the same name, the first one wins. dipole comes first.
    """
    return _search(kind, pattern)[0]


def broken_folders(kind: str) -> list[PluginError]:
    """Return an error for each declared folder of a kind that is missing or repeats a file name."""
    return _search(kind, "*")[1]


def _search(kind: str, pattern: str) -> tuple[dict[str, Path], list[PluginError]]:
    found: dict[str, Path] = {}
    broken: list[PluginError] = []
    for point in points(kind):
        try:
            files = {path.stem: path for path in sorted(_folder(point).glob(pattern), key=str)}
        except PluginError as error:
            broken.append(error)
            continue
        if taken := sorted(files.keys() & found):
            broken.append(PluginError(point, f"these names are taken by other packages: {', '.join(taken)}."))
        found = files | found
    return found, broken


def _folder(point: EntryPoint) -> Path:
    try:
        spec = importlib.util.find_spec(point.module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it imports the parents of a dotted name
        raise PluginError(point, error) from error
    for parent in (spec.submodule_search_locations if spec else None) or ():
        if (folder := Path(parent, point.attr or "")).is_dir():
            return folder
    raise PluginError(point, f"there is no folder {point.attr!r} in a package {point.module!r}.")
