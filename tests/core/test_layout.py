"""The shape of the package: what imports what, and what an import costs."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "core": {"core"},
    "vision": {"core", "vision"},
    "text": {"core", "text"},
    "rl": {"core", "rl"},
    "benchmarks": {"core", "vision", "text", "rl", "benchmarks"},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Scripts of the checkout, which are not in the wheel.
# Scripts of the checkout, which are not in the wheel.
SCRIPTS = [ROOT / "benchmarks" / name for name in ("soak", "speed", "studies")]
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in ALLOWED}
EVERY = [path for files in FILES.values() for path in files]
PACKAGES = sorted(
    ".".join(("dipole", *path.parent.relative_to(ROOT).parts))
    for path in EVERY
    if path.name == "__init__.py" and path.parent not in SCRIPTS
)


@cache
def nodes(path):
    """Every node of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def module_of(path):
    return ".".join(("dipole", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_packages_are_installed_and_imported_under_one_name():
    assert "core" not in sys.modules
    assert PROJECT["tool"]["setuptools"]["packages"] == ["dipole", *PACKAGES]
    scripts = "|".join(path.name for path in SCRIPTS)
    for path in EVERY:
        assert path.with_name("__init__.py").exists(), f"{path} is in no package"
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in ALLOWED, path
        assert path.parent in SCRIPTS or not re.search(rf"dipole\.benchmarks\.({scripts})\b", path.read_text()), path


def layers():
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    return [re.split(r" \| ", layer) for layer in contract["layers"]]


def test_every_room_has_its_layer():
    rooms = {name for name in PACKAGES if name.count(".") == 1 or re.fullmatch(r"dipole\.core\.\w+", name)}
    assert {name for layer in layers() for name in layer} == rooms - {"dipole.core"}


def room_of(name):
    """The level, from the top, and the room that a dotted name lies in; None for what is in none."""
    for level, layer in enumerate(layers()):
        for room in layer:
            if name == room or name.startswith(f"{room}."):
                return level, room
    return None


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_names_in_text_point_down_too(folder):
    """A module named in a string is an import that no linter sees."""
    for path in FILES[folder]:
        own = room_of(module_of(path))
        for text in [n.value for n in nodes(path) if isinstance(n, ast.Constant) and type(n.value) is str]:
            if folder == "core":
                assert not re.search(r"\bdipole\.(vision|text|rl|benchmarks)\b", text), (path, text)
            if re.fullmatch(r"dipole(\.\w+)+(:\w+)?", text) and own is not None:
                named = room_of(text.partition(":")[0])
                assert named is None or named[0] > own[0] or named[1] == own[1], (path, text)


@pytest.mark.parametrize("folder", ["vision", "text", "rl", "core"])
def test_nobody_asks_for_a_framework_or_an_objective_by_name(folder):
    """What is special about one, it says itself; another of its kind can then say the same."""
    for path in FILES[folder]:
        for node in nodes(path):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                asked = node.left.attr in ("method", "registered_name", "objective")
                texts = [each.value for each in node.comparators if isinstance(each, ast.Constant)]
                assert not asked or not [text for text in texts if text and text != "none"], (path, node.lineno)


def test_core_needs_no_chart_library():
    """Only the extras that draw install one: core imports it inside the functions that draw."""
    for path in FILES["core"]:
        for node in ast.parse(path.read_text()).body:
            assert not re.search(r"^(import|from) (matplotlib|altair)\b", ast.unparse(node), re.MULTILINE), path
    assert not any(line.startswith(("matplotlib", "altair")) for line in PROJECT["project"]["dependencies"])


def test_the_places_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:core|vision|text|rl|benchmarks|tests)/[\w./]*)`", text))
    assert len(named) > 12
    assert not [place for place in sorted(named) if not (ROOT / place).exists()]


def imports_of(path, modules):
    """Modules of dipole that a file imports, inside functions and for type checkers included."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names.values()}
    return found & modules.keys()


def test_there_is_no_import_cycle():
    modules = {module_of(path): path for path in EVERY}
    waiting = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    while free := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting, f"a cycle is among {sorted(waiting)}"
