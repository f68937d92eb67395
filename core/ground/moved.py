"""Old import paths of modules that have moved: the documented names of earlier versions go on working.

`forward("dipole.core", {"optim": "train.optimizer"})` makes `import dipole.core.optim` give the very module
`dipole.core.train.optimizer`, so that nothing exists twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Moved(MetaPathFinder, Loader):
    def __init__(self, package: str, moved: Mapping[str, str]) -> None:
        self.package = package
        self._moved = moved

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        new = self._new_name(name)
        return None if new is None else ModuleSpec(name, self, origin=new)

    def _new_name(self, name: str) -> str | None:
        if not name.startswith(f"{self.package}."):
            return None
        parts = name[len(self.package) + 1 :].split(".")
        for count in range(len(parts), 0, -1):
            if new := self._moved.get(".".join(parts[:count])):
                home = [] if new.startswith("dipole.") else [self.package]
                return ".".join([*home, new, *parts[count:]])
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has run under its own name; the import system has just overwritten where it says it is from.
        module.__spec__ = self._own

    def get_code(self, name: str) -> Any:
        """What `python -m OLD.NAME` runs."""
        found = import_module("importlib.util").find_spec(self._new_name(name) or name)
        return found.loader.get_code(found.name)


def forward(package: str, moved: Mapping[str, str]) -> None:
    """Let old names of modules of a package be imported as before; new ones are relative to it, or begin "dipole."."""
    if not any(isinstance(finder, _Moved) and finder.package == package for finder in sys.meta_path):
        # First: a submodule of a moved package would otherwise be found through its folder and exist twice.
        sys.meta_path.insert(0, _Moved(package, moved))
