"""Entries that the files of a folder register: adding one is adding a file."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar

from dipole.core.ground.errors import RegistryError

T = TypeVar("T")


class Entries(dict[str, T]):
    """Entries by name; a name is taken once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, name: str, entry: T) -> None:
        """Keep an entry; RegistryError where its name is taken."""
        if name in self:
            raise RegistryError(f"there is already {self.kind} {name!r}; give another name.")
        self[name] = entry


def import_files(package: str) -> dict[str, ModuleType]:
    """Import every file of a package, in alphabetical order: each registers its own; returned by name."""
    folder = import_module(package).__path__
    return {name: import_module(f"{package}.{name}") for name in sorted(each.name for each in iter_modules(folder))}
