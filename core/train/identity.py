"""What identifies a run: the part of a configuration that determines its result, as canonical text and its hash.

    {"schema": 1, "objective": every term with every option written out, "domain": ..., "seed": ...,
     "train": {...}, "<domain>": {...}, "sources": {"<package>": [distribution, version, sha256]}}

An objective is written out, so that `infonce` and `infonce(temperature=0.5)` are one run and a changed default is
another. An option that an entry was given later, and of the tables every value, stands there only where it differs from
the default (`Option.later`, `Settings.determining`), so that a new setting does not rename old runs. Code that does not
come with dipole (an objective or a domain of somebody's package, script or notebook) enters with its distribution's
version and a hash of its source; so does what it imports of its own distribution beside the package.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import linecache
import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Counts up when the rules of this page change: every run gets another name then."""
_NOT_FOREIGN = {"dipole", "torch", "pydantic", "gymnasium", *sys.stdlib_module_names} - {"__main__"}


def digest(values: Mapping[str, Any]) -> str:
    """Twelve hex digits: SHA-256 of the values as canonical JSON, in which 1 and 1.0 are the same number."""
    text = json.dumps(_plain(values), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def written_out(objective: Any) -> list[list[Any]]:
    """[weight, name, options] of each term of a Composite, with every option that was left to its default."""
    from dipole.core.objectives.objective import entry_of  # late: it loads torch

    terms: list[list[Any]] = []
    for _, weight, term in objective:
        entry = entry_of(term)
        given = term.__dict__.get("given", {})
        left = {each.name: each.default for each in entry.options if each.name not in given and not each.later}
        terms.append([weight, entry.name, left | given])
    return terms


@dataclass(frozen=True)
class Source:
    """Code from outside dipole that a run goes through: a package, a module, or a class of a script or notebook."""

    name: str
    files: tuple[Path, ...]
    text: str = ""

    @property
    def stamp(self) -> list[str]:
        """[distribution, version, SHA-256 of the source]; the first two are empty for code that nobody installed."""
        own = _distribution_of(self.name)
        known = self._known
        content = hashlib.sha256(self.text.encode()).hexdigest() if self.text or not known else _hash_of(known)
        return [own, version(own) if own else "", content]

    @property
    def companions(self) -> list[Source]:
        """What it imports of its own distribution beside its package; of code that nobody installed, what lies so."""
        if self.text:
            return []
        found, own = [], _distribution_of(self.name)
        for name in _imported(self._known):
            if name not in _NOT_FOREIGN and name != self.name and _distribution_of(name) == own:
                found.append(_of_path(name))
        return [each for each in found if each.files]

    @property
    def _known(self) -> tuple[tuple[Path, int, int], ...]:
        return tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in self.files)

    @property
    def changed(self) -> float:
        """When a file of it was last changed, in seconds of the system's clock; infinity where nobody knows."""
        return max((path.stat().st_mtime for path in self.files), default=math.inf)


def foreign_sources(code: Iterable[Any]) -> dict[str, Source]:
    """Sources of functions and classes, and of what these inherit, that come neither with dipole nor its libraries."""
    found: dict[str, Source] = {}
    for each in (base for one in code for base in getattr(one, "__mro__", (one,))):
        if each.__module__.partition(".")[0] not in _NOT_FOREIGN:
            source = _of_main(each) if each.__module__ == "__main__" else _of_module(each.__module__)
            found[source.name] = source
    waiting = list(found.values())
    while waiting:
        new = [each for each in waiting.pop().companions if each.name not in found]
        found |= {each.name: each for each in new}
        waiting += new
    return found


def _of_module(name: str) -> Source:
    """The topmost package that a module lies in (below a namespace package), or the module."""
    parts = name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    root = next((each for each in prefixes if getattr(sys.modules.get(each), "__file__", None)), name)
    module = sys.modules.get(root)
    if folders := getattr(module, "__path__", None):
        return Source(root, tuple(path for folder in folders for path in sorted(Path(folder).rglob("*.py"))))
    file = getattr(module, "__file__", None)
    return Source(root, (Path(file),) if file else ())


def _of_path(name: str) -> Source:
    """A module or package of the search path, imported already or not: a run has one name before and after."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # __main__ and its like have no place
        spec = None
    if spec is None or not spec.has_location or not spec.origin:
        return Source(name, ())
    folders = spec.submodule_search_locations
    if folders is None:
        return Source(name, (Path(spec.origin),))
    return Source(name, tuple(path for folder in folders for path in sorted(Path(folder).rglob("*.py"))))


def _of_main(code: Any) -> Source:
    """A class or function of the script or notebook that runs: its own lines, not those that start the runs."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):
        text = _in_cell(code)
    return Source(f"__main__.{code.__qualname__}", (Path(file),) if file else (), text)


def _in_cell(code: Any) -> str:
    """A class of a notebook, where inspect finds no more than its functions: the lines of the cell that define it."""
    for each in vars(code).values() if inspect.isclass(code) else ():
        function = inspect.unwrap(getattr(each, "__func__", each))
        if not inspect.isfunction(function):
            continue
        lines = linecache.getlines(function.__code__.co_filename)
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == code.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _distribution_of(name: str) -> str:
    """Whose a module is; empty where nobody installed it."""
    return next(iter(_distributions(tuple(sys.path)).get(name.partition(".")[0], ())), "")


@lru_cache(maxsize=1)
def _distributions(search_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    return packages_distributions()


@lru_cache(maxsize=64)
def _imported(known: tuple[tuple[Path, int, int], ...]) -> tuple[str, ...]:
    """First names of what files import, wherever in them."""
    found: set[str] = set()
    for path, _, _ in known:
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
    return tuple(sorted(found))


@lru_cache(maxsize=64)
def _hash_of(known: tuple[tuple[Path, int, int], ...]) -> str:
    """The hash of files that have not changed since they were last looked at."""
    found = hashlib.sha256()
    root = os.path.commonpath([path.parent for path, _, _ in known])
    for path, _, size in known:
        found.update(f"{path.relative_to(root).as_posix()}\0{size}\0".encode() + path.read_bytes())
    return found.hexdigest()
