"""List the public names: exports of packages, imports in the documentation, and the types that these return."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard, is_typeddict

from pydantic import BaseModel

from dipole.core.objectives.registry import registry

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("dipole", "dipole.text", "dipole.vision", "dipole.rl")
"""Packages whose exports have these names."""
PARTS = (
    "dipole.benchmarks.statistics",
    "dipole.core.objectives.statistics",
    "dipole.core.utils.errors",
    "dipole.core.evaluation.diagnostics",
    "dipole.core.evaluation.theory.report",
    "dipole.core.train.domains",
    "dipole.rl.episodes",
    "dipole.text.encode",
    "dipole.vision.encoders.base",
    "dipole.vision.frameworks.base",
    "dipole.vision.sources.base",
)
"""Modules that guides refer to: their `__all__`, or everything that they define."""
NAMES = (
    "dipole.core.cli.main",
    "dipole.core.conformance.subjects.Subject",
    "dipole.core.objectives.registry.Registry",
    "dipole.core.objectives.losses.infonce.Tempered",
    "dipole.core.train.run.Run",
    "dipole.core.train.signals.RunInterruptedError",
    "dipole.core.train.theory.theory_of_run",
    "dipole.rl.envs.suite.rendering.RenderingError",
    "dipole.rl.pixel_agent.PixelAgent",
    "dipole.rl.sampling.FrameBatch",
    "dipole.rl.sampling.FrameSampler",
    "dipole.rl.settings.AgentSettings",
    "dipole.rl.snapshots.save",
    "dipole.vision.modeling_dipole_vision.DipoleVisionModel",
)
"""Single names that guides refer to."""
INTERNAL = re.compile(r"dipole\.benchmarks\.(?!statistics\b)")
"""Parts of suites, claims and reports that tutorials use, and that programs of others need not."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = ("examples/*.py", "docs/tutorials/*.py", "tests/plugin/example/**/*.py", "core/cli/template/**/*.py.in")
PROPERTIES = (property, cached_property)
HIDDEN = ("reference", "extra_repr")
"""Methods that pages omit (mkdocs.yml, filters)."""


@dataclass(frozen=True)
class Entry:
    """An item of a page: a class, a function, or a method or property of a class.

    Args:
        name: dotted name on the page.
        value: the object.
        function: the constructor of a class, the getter of a property, or None.
        owner: class of a method or property.
    """

    name: str
    value: Any
    function: Any
    owner: type | None = None

    @property
    def doc(self) -> str:
        """Return the item's own docstring, for a class with that of its constructor."""
        own = [vars(self.value).get("__doc__") if inspect.isclass(self.value) else self.value.__doc__]
        own += [getattr(self.function, "__doc__", None)] if inspect.isclass(self.value) else []
        return "\n\n".join(inspect.cleandoc(text) for text in own if text)


@cache
def public_names() -> dict[str, tuple[str, Any]]:
    """Map each public name to the place of its definition and its value."""
    names = [f"{room}.{name}" for room in ROOMS for name in getattr(import_module(room), "__all__", ())]
    names += [f"{part}.{name}" for part in PARTS for name in exports(import_module(part))]
    names += [*NAMES, *sorted(set(documented_imports()))]
    waiting = [(name, resolve(name)) for name in names if not name.rpartition(".")[2].startswith("__")]
    # A module is shown as a whole, so that what it has needs no place of its own.
    shown = [(name, value) for _, each in waiting for name, value in inside(each)]
    homes = {home(*each) for each in shown}
    waiting += [found for _, value in shown for found in results(value)]
    names_to: dict[str, tuple[str, Any]] = {}
    while waiting:
        name, value = waiting.pop(0)
        place = home(name, value)
        if place not in homes and not INTERNAL.match(place):
            homes.add(place)
            names_to[name] = place, value
            waiting += results(value)
    return dict(sorted(names_to.items()))


def entries() -> list[Entry]:
    """Return all items of pages, with methods and properties of classes, and registered objectives."""
    pairs = [(name, value) for name, (_, value) in public_names().items()]
    pairs += [pair for _, value in public_names().values() for pair in inside(value)]
    found = {id(each.value): each for name, value in pairs for each in entries_of(name, value)}
    shown = [each for entry in found.values() for each in (entry, *members(entry))]
    own = [each for each in registry.entries() if each.package == "dipole" and id(each.target) not in found]
    return shown + [each for entry in own for each in entries_of(entry.name, entry.target)]


def entries_of(name: str, value: Any) -> list[Entry]:
    """Return the item of a class or function, or nothing for other values."""
    if inspect.isclass(value):
        constructor = vars(value).get("__init__")
        return [Entry(name, value, constructor if is_own(constructor, value) else None)]
    function = inspect.unwrap(value) if callable(value) else None
    return [Entry(name, value, function)] if inspect.isroutine(function) else []


def members(entry: Entry) -> Iterator[Entry]:
    """Yield methods and properties of a class, those of its private bases included."""
    seen: set[str] = set()
    for owner in bases(entry.value):
        for name, value in vars(owner).items():
            function = called(value)
            if is_own(function, owner) and not name.startswith("_") and name not in HIDDEN and name not in seen:
                seen.add(name)
                shown = value if isinstance(value, PROPERTIES) else function
                yield Entry(f"{entry.name}.{name}", shown, function, owner)


def bases(value: Any) -> list[type]:
    """Return a class of dipole and its bases without a page, up to the first base with a page."""
    if not inspect.isclass(value):
        return []
    of_pages = {place for place, _ in public_names().values()}
    found = [value]
    for base in value.__mro__[1:]:
        if base.__module__.startswith("dipole") and home("", base) not in of_pages:
            found.append(base)
    return found


def is_own(function: Any, owner: type) -> TypeGuard[FunctionType]:
    """Return whether the class itself defines the function."""
    return isinstance(function, FunctionType) and function.__qualname__.startswith(f"{owner.__qualname__}.")


def called(value: Any) -> Any:
    """Return the function of a class attribute."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, cached_property):
        return value.func
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def exports(module: ModuleType) -> list[str]:
    """Return a module's `__all__`, or all names that it defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    # A number that another module hands on at its first use has no place that could be shown.
    return [name for name in names if name in vars(module) or hasattr(getattr(module, name), "__module__")]


def inside(module: Any) -> list[tuple[str, Any]]:
    """Return dotted names and values of a module's exports, or nothing for other values."""
    names = exports(module) if isinstance(module, ModuleType) else []
    return [(f"{module.__name__}.{name}", getattr(module, name)) for name in names]


def results(value: Any) -> list[tuple[str, type]]:
    """Return names and classes of dipole that a function returns or a class has as fields."""
    functions = [value] if inspect.isroutine(value) else []
    found: list[type] = []
    if inspect.isclass(value) and value.__module__.startswith("dipole"):
        functions = [each for each in map(called, vars(value).values()) if is_own(each, value)]
        functions = [each for each in functions if not each.__name__.startswith("_")]
        for name in fields(value):
            found += classes(hint(value.__annotations__[name]), value.__module__)
    for function in map(inspect.unwrap, functions):
        if function.__module__.startswith("dipole"):
            found += classes(hint(inspect.signature(function).return_annotation), function.__module__)
    return [(home("", each), each) for each in found]


def fields(value: type) -> list[str]:
    """Return the fields that a dataclass defines itself."""
    of_data = hasattr(value, "__dataclass_fields__") or issubclass(value, BaseModel | tuple) or is_typeddict(value)
    own = vars(value).get("__annotations__", {}) if of_data else {}
    return [name for name, annotation in own.items() if name[0] != "_" and "ClassVar" not in hint(annotation)]


def hint(annotation: Any) -> str:
    """Return an annotation as text."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def classes(annotation: str, module: str) -> Iterator[type]:
    """Return the classes of dipole in an annotation."""
    for word in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*", annotation)):
        dotted = word if word.startswith("dipole.") else _imports(module).get(word, "")
        value = resolve(dotted) if dotted.startswith("dipole.") else None
        if inspect.isclass(value) and value.__module__.startswith("dipole") and not value.__name__.startswith("_"):
            yield value


@cache
def _imports(module: str) -> dict[str, str]:
    """Map names in a module to dotted names, imports for type checkers included."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = f"{module}.{node.name}"
    return found


def documented_imports() -> Iterator[str]:
    """Yield every `from dipole... import name` in docs, README, examples and templates."""
    texts = [block for page in pages() for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    texts += [path.read_text(encoding="utf-8") for pattern in CODE for path in sorted(ROOT.glob(pattern))]
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a part of a program
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dipole" and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pages() -> list[Path]:
    """Return the Markdown files that are not generated."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def resolve(name: str) -> Any:
    """Import a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError:
        return import_module(name)


def home(name: str, value: Any) -> str:
    """Return the dotted name of the definition, which has the docstring."""
    if isinstance(value, ModuleType):
        return value.__name__
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualified, str) and module.startswith("dipole"):
        # A bound method, such as `register`, is documented at its class.
        return f"{module}.{qualified}"
    return name
