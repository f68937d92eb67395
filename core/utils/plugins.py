"""Plug-ins: entry points of installed packages, loaded so that a broken one gives an error with its name.

dipole declares its own parts in the same way. If an entry point fails, everything that it registered is removed again
from the tables made by `undoable`. DIPOLE_PLUGINS=none ignores other packages.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from itertools import takewhile
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

from dipole.core.utils.errors import ConfigError, DipoleError, RegistryError

T = TypeVar("T")
OURS = "dipole"
SWITCH = "DIPOLE_PLUGINS"
GROUPS = ("objectives", "domains", "commands", "recipes", "suites", "published")
"""Kinds of entry points: the group of a kind is "dipole.KIND" (CONTRIBUTING.md says what it names)."""


class PluginError(DipoleError, ImportError):
    """A plug-in cannot be used.

    Args:
        point: its entry point.
        error: the exception or the problem.
    """

    def __init__(self, point: EntryPoint, error: BaseException | str) -> None:
        reason = str(error)
        if not isinstance(error, str | DipoleError):  # whose messages are complete
            reason = f"{type(error).__name__}: {error}"
        super().__init__(f"{point.name!r} of {distribution(point)} ({point.group}: {point.value}): {reason}")
        self.point = point
        self.package = package(point)
        self.reason = reason


def points(kind: str) -> list[EntryPoint]:
    """Return the entry points of a kind: dipole's own first, then other packages by name, unless switched off."""
    found = _sorted_points(f"{OURS}.{kind}", entry_points, _installed())
    ignored = switched_off()
    return [point for point in found if is_ours(point) or not ignored]


def switched_off() -> bool:
    """Return whether DIPOLE_PLUGINS=none ignores other packages."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value not in ("", "all", "none"):
        raise ConfigError(f"{SWITCH} must be none (ignore plug-ins of other packages) or all, got {value[:80]!r}.")
    return value == "none"


@lru_cache(maxsize=32)
def _sorted_points(group: str, find: Callable[..., Iterable[EntryPoint]], installed: object) -> tuple[EntryPoint, ...]:
    """Cached until something is installed: reading the metadata of all packages takes about 30 ms."""
    return tuple(sorted(find(group=group), key=lambda point: (not is_ours(point), package(point), point.name)))


def _installed() -> tuple[tuple[str, int], ...]:
    """Return the search path with modification times, which change when a package is installed or removed."""
    found = []
    for place in sys.path:
        with suppress(OSError):
            found.append((place, os.stat(place or ".").st_mtime_ns))
    return tuple(found)


def package(point: EntryPoint) -> str:
    """Return the name of the distribution that declares an entry point."""
    if point.dist is None:
        return "(no package)"
    return _name(point.dist)


@lru_cache(maxsize=256)
def _name(found: Distribution) -> str:
    """Cached, because each access reads all metadata and a suite asks thousands of times."""
    return found.name


def distribution(point: EntryPoint) -> str:
    """Return name and version of the distribution that declares an entry point."""
    if point.dist is None:
        return package(point)
    return f"{point.dist.name} {point.dist.version}"


def is_ours(point: EntryPoint) -> bool:
    """Return whether dipole itself declares an entry point."""
    return package(point) == OURS


def declared_by(module: str) -> str:
    """Return name and version of the plug-in that a module belongs to, or "".

    It is the plug-in whose entry point shares the longest prefix of the dotted name.
    """
    best, owner = 0, None
    for kind in GROUPS:
        for point in points(kind):
            pairs = zip(module.split("."), point.module.split("."), strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if shared > best:
                best, owner = shared, point
    if owner is None:
        return ""
    if is_ours(owner):
        return OURS
    return distribution(owner)


_tables: list[tuple[dict[Any, Any], Callable[[Any], str]]] = []


def undoable(module: Callable[[Any], str] = lambda value: "") -> dict[Any, Any]:
    """Return a table of registered values that is restored when a plug-in fails while it is imported.

    `module` returns the name of the module that registered a value, which must be imported again, or "" for none.
    """
    table: dict[Any, Any] = {}
    _tables.append((table, module))
    return table


def load(point: EntryPoint) -> Any:
    """Import what an entry point names.

    Raise PluginError if anything failed, including `sys.exit`. Nothing of it stays registered.
    """
    before = [(table, dict(table), module) for table, module in _tables]
    modules = set(sys.modules)
    try:
        return point.load()
    except BaseException as error:
        half = {module(table[key]) for table, old, module in before for key in table.keys() - old.keys()}
        for table, old, _ in before:
            table.clear()
            table.update(old)
        # Forget modules that it imported, so that another package that needs them registers them again.
        for name in half - modules:
            sys.modules.pop(name, None)
            parent, _, last = name.rpartition(".")
            vars(sys.modules.get(parent, ModuleType(""))).pop(last, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginError(point, error) from error


def load_each(
    kind: str, read: Callable[[EntryPoint], T], taken: Iterable[str] = ()
) -> tuple[dict[str, T], list[PluginError]]:
    """Return what `read` makes of each entry point of a kind, by name, and the errors of those that cannot be used.

    The first of a name counts. Names of dipole that are no entry points are `taken`.
    """
    found: dict[str, T] = {}
    broken: list[PluginError] = []
    owners = dict.fromkeys(taken, OURS)
    for point in points(kind):
        try:
            if point.name in owners:
                raise PluginError(point, f"the name is taken by the package {owners[point.name]}.")
            found[point.name] = read(point)
        except PluginError as error:
            broken.append(error)
        owners.setdefault(point.name, package(point))
    return found, broken


def import_all(folder: str) -> dict[str, ModuleType]:
    """Import every module of a package in alphabetical order, so that each registers its definitions."""
    listed = iter_modules(import_module(folder).__path__)
    return {name: import_module(f"{folder}.{name}") for name in sorted(each.name for each in listed if not each.ispkg)}


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
            files = {path.stem: path for path in sorted(_folder_of(point).glob(pattern), key=str)}
        except PluginError as error:
            broken.append(error)
            continue
        if taken := sorted(files.keys() & found):
            broken.append(PluginError(point, f"these names are taken by other packages: {', '.join(taken)}."))
        found = files | found
    return found, broken


def _folder_of(point: EntryPoint) -> Path:
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


class Entries(dict[str, T]):
    """Entries that the files of a folder register, by unique name. kind: of an entry, for messages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates under a name, or raises RegistryError if the name is taken."""

        def decorate(entry: T) -> T:
            if name in self:
                raise RegistryError(f"there is already {self.kind} {name!r}. Choose another name.")
            self[name] = entry
            return entry

        return decorate
