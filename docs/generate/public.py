"""What is public: what the packages export, and what the documentation imports."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("dipole", "dipole.text", "dipole.vision", "dipole.rl")
DECORATORS = (
    "dipole.core.train.domains.add_domain",
    "dipole.vision.encoders.base.register_encoder",
    "dipole.vision.frameworks.base.register_framework",
    "dipole.vision.sources.base.register_source",
)
"""What a package of one's own registers with (CONTRIBUTING)."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def public_names() -> dict[str, tuple[str, Any]]:
    """Dotted name -> (where it is defined, what it is), of everything that is public."""
    names = [f"{room}.{name}" for room in ROOMS for name in getattr(import_module(room), "__all__", ())]
    exported = {name.rpartition(".")[2] for name in names}
    names += [name for name in (*DECORATORS, *documented_imports()) if name.rpartition(".")[2] not in exported]
    found = {}
    for name in sorted(set(names)):
        value = resolve(name)
        if not name.rpartition(".")[2].startswith("__"):
            found[name] = (home(name, value), value)
    return found


def documented_imports() -> Iterator[str]:
    """Every `from dipole... import name` of the code in docs, README and examples."""
    texts = [block for page in pages() for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    texts += [
        path.read_text(encoding="utf-8")
        for folder in ("examples", "docs/tutorials")
        for path in (ROOT / folder).glob("*.py")
    ]
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a part of a program
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dipole" and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pages() -> list[Path]:
    """The Markdown that is written by hand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def resolve(name: str) -> Any:
    """What a dotted name is."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except AttributeError:
        return import_module(name)


def home(name: str, value: Any) -> str:
    """The dotted name under which something is defined, which is where its docstring is read."""
    if isinstance(value, ModuleType):
        return value.__name__
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualified, str) and module.startswith("dipole"):
        # A bound method, such as `register`, is documented at its class.
        return f"{module}.{qualified}"
    return name


def undocumented() -> list[str]:
    """Public names, and public methods of public classes, whose docstring has no sentence."""
    missing = []
    for name, (_, value) in public_names().items():
        if isinstance(value, ModuleType) or inspect.isroutine(value) or inspect.isclass(value):
            missing += [] if has_sentence(value) else [name]
        if inspect.isclass(value):
            missing += [
                f"{name}.{method}"
                for method, function in vars(value).items()
                if not method.startswith("_")
                and isinstance(function, (property, staticmethod, classmethod)) | inspect.isfunction(function)
                and not has_sentence(getattr(value, method))
            ]
    return missing


def unexplained() -> list[str]:
    """Arguments of public functions and classes that no docstring names, neither theirs nor one of a base class."""
    missing = []
    for name, (_, value) in public_names().items():
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        told = [value, *(value.__mro__[:-1] if inspect.isclass(value) else ())]
        words = "\n".join(f"{inspect.getdoc(each)}\n{inspect.getdoc(each.__init__)}" for each in told)
        missing += [
            f"{name}({argument.name})"
            for argument in _signature(value)
            if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
            and not argument.name.startswith("_")
            and not re.search(rf"\b{argument.name}\b", words)
        ]
    return missing


def _signature(value: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(value).parameters.values())
    except ValueError:  # of exceptions, which take what every exception takes
        return []


def has_sentence(value: Any) -> bool:
    """Whether the docstring, its own or an inherited one, begins with a sentence."""
    first = (inspect.getdoc(value) or "").partition("\n\n")[0].strip()
    return bool(re.search(r"\w{2,}.*[.:]$", first, re.DOTALL))
