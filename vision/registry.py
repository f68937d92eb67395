"""Named entries that the files of a folder register."""

from typing import TypeVar

from dipole.core.utils.errors import RegistryError

T = TypeVar("T")


class Entries(dict[str, T]):
    """Entries by unique name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def add(self, name: str, entry: T) -> None:
        """Add an entry. Raise RegistryError if its name is taken."""
        if name in self:
            raise RegistryError(f"there is already {self.kind} {name!r}; choose another name.")
        self[name] = entry
