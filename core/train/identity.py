"""The run id: a hash of the part of a configuration that determines the result.

    {"schema": 1, "objective": every term with every option, "domain": ..., "seed": ...,
     "train": {...}, "<domain>": {...}, "sources": {"<package>": [distribution, version, sha256]}}

The objective is written out, so `infonce` and `infonce(temperature=0.5)` are one run, and a changed default is another.
Options that were added later (`Option.later`) and values of tables (`Settings.determining`) enter only where they
differ from the default, so that a new setting does not rename old runs. An option whose default is not what earlier
runs did (`Option.former`) enters unless it has that earlier value. Code from outside dipole enters with its
distribution, version and a hash of its source.
"""

import ast
import hashlib
import inspect
import json
import linecache
import marshal
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Increase it when the rules of this page change. Every run then gets another id."""
_NOT_FOREIGN = {"dipole", "torch", "pydantic", "gymnasium", *sys.stdlib_module_names} - {"__main__"}


def values_hash(values: Mapping[str, Any]) -> str:
    """Return twelve hex digits: SHA-256 of the values as canonical JSON, in which 1 and 1.0 are the same number."""
    plain = json.loads(json.dumps(values), parse_float=_number)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _number(text: str) -> float:
    value = float(text)
    if value.is_integer():
        return int(value)
    return value


def written_out(objective: Any) -> list[list[Any]]:
    """Return [weight, name, options] of each term of a Composite, defaults included."""
    from dipole.core.objectives.objective import entry_of  # late: it loads torch

    terms: list[list[Any]] = []
    for _, weight, term in objective:
        entry = entry_of(term)
        given = term.__dict__.get("given", {})
        defaults = {each.name: each.default for each in entry.options if not each.later}
        values = defaults | given
        for each in entry.options:
            if each.former is not None and values[each.name] == each.former.value:
                del values[each.name]
        terms.append([weight, entry.name, values])
    return terms


def foreign_sources(code: Iterable[Any]) -> dict[str, list[str]]:
    """Return [distribution, version, SHA-256 of the source] of code and its base classes from outside dipole.

    The keys are the top-level package of installed code, a single module or script, or a class of a notebook or of
    standard input. The first two entries are empty for code that is not installed.
    """
    found: dict[str, list[str]] = {}
    for each in (base for one in code for base in getattr(one, "__mro__", (one,))):
        top = each.__module__.partition(".")[0]
        if top in _NOT_FOREIGN:
            continue
        name, files = _package(each.__module__)
        if top == "__main__" and not files:
            found[f"__main__.{each.__qualname__}"] = ["", "", hashlib.sha256(_source_in_main(each)).hexdigest()]
        elif name not in found:
            owner = next(iter(_distributions(tuple(sys.path)).get(top, ())), "")
            found[name] = [owner, version(owner) if owner else "", _hash_files(files)]
    return found


def _package(module_name: str) -> tuple[str, list[Path]]:
    """Return the topmost package of a module (below a namespace package), or the module, with its source files."""
    parts = module_name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    name = next((each for each in prefixes if getattr(sys.modules.get(each), "__file__", None)), module_name)
    module = sys.modules.get(name)
    if folders := getattr(module, "__path__", None):
        return name, [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    file = getattr(module, "__file__", None)
    return name, [Path(file)] if file else []


def _hash_files(files: list[Path]) -> str:
    found = hashlib.sha256()
    root = os.path.commonpath([path.parent for path in files] or [Path()])
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def _source_in_main(code: Any) -> bytes:
    """Return the lines of a class or function of a notebook, or of standard input its compiled functions."""
    with suppress(OSError, TypeError):
        return inspect.getsource(code).encode()
    # In a notebook, inspect finds the functions of a class, but not the class. Look for it in the cell of a function.
    members = vars(code).values() if inspect.isclass(code) else [code]
    functions = [inspect.unwrap(getattr(each, "__func__", each)) for each in members]
    functions = [each for each in functions if inspect.isfunction(each)]
    for function in functions:
        lines = linecache.getlines(function.__code__.co_filename)
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == code.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno]).encode()
    return b"".join(marshal.dumps(each.__code__, 2) for each in functions)  # of standard input: no lines are kept


@cache
def _distributions(search_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    return packages_distributions()
