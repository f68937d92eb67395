"""Named entries that the files of a folder register."""

from collections.abc import Callable
from typing import TypeVar

from dipole.core.utils.errors import RegistryError

T = TypeVar("T")


class Entries(dict[str, T]):
    """Entries by unique name."""

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
