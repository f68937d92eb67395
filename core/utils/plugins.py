"""What installed packages add: entry points of a group, loaded so that a broken one is an error with a name.

dipole declares its own parts in the same way. Where one cannot be loaded, what it had registered until then is undone:
a table of registered things takes part in that by `undoable`. DIPOLE_PLUGINS=none leaves other packages out.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from itertools import takewhile
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from dipole.core.utils.errors import ConfigError, DipoleError

OURS = "dipole"
SWITCH = "DIPOLE_PLUGINS"
# What an entry point of each kind names; the group is "dipole.KIND".
KINDS = {
    "objectives": "a module whose import registers",
    "domains": "a Domain (core/train/domains.py)",
    "commands": "a function as in core/cli/app.py",
    "recipes": "a folder of a package, package:folder",
    "suites": "a folder of a package",
    "published": "a folder of a package",
}


class PluginError(DipoleError, ImportError):
    """What a package adds cannot be used.

    Args:
        point: the entry point that names it.
        error: what happened, or what is wrong with it.
    """

    def __init__(self, point: EntryPoint, error: BaseException | str) -> None:
        # An error of ours says all there is to say; of any other, the type belongs to it.
        known = isinstance(error, str | DipoleError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        super().__init__(f"{point.name!r} of {distribution(point)} ({point.group}: {point.value}): {reason}")
        self.point = point
        self.package = package(point)
        self.reason = reason


def points(kind: str) -> list[EntryPoint]:
    """The entry points of a kind: dipole's own first, then those of other packages by name, unless switched off."""
    found = _sorted_points(f"{OURS}.{kind}", entry_points, _installed())
    return [point for point in found if is_ours(point)] if switched_off() else list(found)


def switched_off() -> bool:
    """Whether the environment leaves out what other packages add.

    Raises:
        ConfigError: for a value that is neither none nor all.
    """
    value = os.environ.get(SWITCH, "").strip().lower()
    if value not in ("", "all", "none"):
        raise ConfigError(f"{SWITCH} must be none (leave out what other packages add) or all, got {value[:80]!r}.")
    return value == "none"


@lru_cache(maxsize=32)
def _sorted_points(group: str, find: Callable[..., Iterable[EntryPoint]], installed: object) -> tuple[EntryPoint, ...]:
    """Kept until something is installed: to read every package's metadata takes some 30 ms, and a suite asks often."""
    return tuple(sorted(find(group=group), key=lambda point: (not is_ours(point), package(point), point.name)))


def _installed() -> tuple[tuple[str, int], ...]:
    """The search path and when each folder on it last changed: another value where a package came or went."""
    found = []
    for place in sys.path:
        try:
            found.append((place, os.stat(place or ".").st_mtime_ns))
        except OSError:
            found.append((place, 0))
    return tuple(found)


def package(point: EntryPoint) -> str:
    """The name of the distribution that declares an entry point."""
    return _name(point.dist) if point.dist else "(no package)"


@lru_cache(maxsize=256)
def _name(found: Distribution) -> str:
    """Kept, as each look reads all of the metadata; a suite asks thousands of times."""
    return found.name


def distribution(point: EntryPoint) -> str:
    """Name and version of the distribution that declares an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else package(point)


def is_ours(point: EntryPoint) -> bool:
    """Whether dipole itself declares it."""
    return package(point) == OURS


def declared_by(module: str) -> str:
    """Name and version of the package that a module of a plug-in comes with; "" for a module nobody declares.

    It is known by the entry points: theirs that shares the longest beginning of its dotted name.
    """
    best, owner = 0, ""
    for kind in KINDS:
        for point in points(kind):
            pairs = zip(module.split("."), point.module.split("."), strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if shared > best:
                best, owner = shared, OURS if is_ours(point) else distribution(point)
    return owner


class Table(dict[Any, Any]):
    """A dict that can be referred to weakly."""


_tables: list[tuple[weakref.ref[Table], Callable[[Any], str]]] = []


def undoable(table: Table, module: Callable[[Any], str] = lambda value: "") -> Table:
    """Let a table be set back to what it was where a plug-in fails while it is imported.

    Args:
        table: name to what was registered.
        module: the name of the module that registered a value, which has to be imported anew; "" for none.
    """
    _tables[:] = [each for each in _tables if each[0]() is not None]
    _tables.append((weakref.ref(table), module))
    return table


def load(point: EntryPoint) -> Any:
    """Import what an entry point names; PluginError whatever goes wrong in it, `sys.exit` included.

    Then nothing of it stays registered.
    """
    before = [(table, dict(table), module) for kept, module in _tables if (table := kept()) is not None]
    modules = set(sys.modules)
    try:
        return point.load()
    except BaseException as error:
        half = {module(table[key]) for table, old, module in before for key in table.keys() - old.keys()}
        for table, old, _ in before:
            table.clear()
            table.update(old)
        # What it imported for the first time goes too: a package that needs it imports, and so registers, it anew.
        for name in half - modules:
            sys.modules.pop(name, None)
            parent, _, last = name.rpartition(".")
            vars(sys.modules.get(parent, ModuleType(""))).pop(last, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise PluginError(point, error) from error


def import_all(folder: str) -> dict[str, ModuleType]:
    """Import every module of a package in the order of their names, so that each registers what it defines."""
    listed = iter_modules(import_module(folder).__path__)
    return {name: import_module(f"{folder}.{name}") for name in sorted(each.name for each in listed if not each.ispkg)}
