"""Entries that the files of a folder register: adding one is adding a file."""

from typing import TypeVar

from dipole.core.utils.errors import RegistryError

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
