"""The shape of the package: what imports what, and what an import costs."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
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
SCRIPTS = [ROOT / "benchmarks" / name for name in ("soak", "speed", "studies")]
PACKAGES = sorted(
    ".".join(("dipole", *path.parent.relative_to(ROOT).parts))
    for folder in ALLOWED
    for path in (ROOT / folder).rglob("__init__.py")
    if path.parent not in SCRIPTS
)


def test_packages_are_installed_and_imported_under_one_name():
    assert "core" not in sys.modules
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    assert node.module.split(".")[0] not in ALLOWED, path
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert listed == ["dipole", *PACKAGES]
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            assert path.with_name("__init__.py").exists(), f"{path} is in no package"
    names = "|".join(path.name for path in SCRIPTS)
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent not in SCRIPTS:
                assert not re.search(rf"dipole\.benchmarks\.({names})\b", path.read_text()), path


def layers():
    (contract,) = PROJECT["tool"]["importlinter"]["contracts"]
    return [re.split(r" \| ", layer) for layer in contract["layers"]]


def test_every_room_has_its_layer():
    """`make lint` holds the order; a room that is in no layer would be free to import anything."""
    rooms = {name for name in PACKAGES if name.count(".") == 1 or re.fullmatch(r"dipole\.core\.\w+", name)}
    assert {name for layer in layers() for name in layer} == rooms - {"dipole.core"}


def room_of(name):
    """The level, from the top, and the room that a dotted name lies in; None for what is in none."""
    for level, layer in enumerate(layers()):
        for room in layer:
            if name == room or name.startswith(f"{room}."):
                return level, room
    return None


def strings(path):
    return [
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and type(n.value) is str
    ]


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_names_in_text_point_down_too(folder):
    """A module named in a string is an import that no linter sees."""
    for path in (ROOT / folder).rglob("*.py"):
        own = room_of(".".join(("dipole", *path.relative_to(ROOT).with_suffix("").parts)))
        for text in strings(path):
            if folder == "core":
                assert not re.search(r"\bdipole\.(vision|text|rl|benchmarks)\b", text), (path, text)
            if re.fullmatch(r"dipole(\.\w+)+(:\w+)?", text) and own is not None:
                named = room_of(text.partition(":")[0])
                assert named is None or named[0] > own[0] or named[1] == own[1], (path, text)


@pytest.mark.parametrize("folder", ["vision", "text", "rl", "core"])
def test_nobody_asks_for_a_framework_or_an_objective_by_name(folder):
    """What is special about one, it says itself; another of its kind can then say the same."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                asked = node.left.attr in ("method", "registered_name", "objective")
                texts = [each.value for each in node.comparators if isinstance(each, ast.Constant)]
                assert not asked or not [text for text in texts if text and text != "none"], (path, node.lineno)


def test_core_needs_no_chart_library():
    """Only the extras that draw install one."""
    files = [path for path in (ROOT / "core").rglob("*.py") if path.stem != "__main__"]
    if find_spec("triton") is None:  # as on most machines without CUDA
        files = [path for path in files if "kernels" not in path.parts]
    modules = [".".join(("dipole", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]
    script = (
        "import sys, importlib\nsys.modules['matplotlib'] = None\n"
        f"for name in {[name.removesuffix('.__init__') for name in modules]}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert not any(line.startswith("matplotlib") for line in PROJECT["project"]["dependencies"])


@pytest.mark.parametrize("page", ["CONTRIBUTING.md"])
def test_the_places_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:core|vision|text|rl|benchmarks|tests)/[\w./]*)`", text))
    assert len(named) > 12
    assert not [place for place in sorted(named) if not (ROOT / place).exists()]


def imports_of(path, modules):
    """Modules of dipole that a file imports, inside functions and for type checkers included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
    return found & set(modules)


def test_there_is_no_import_cycle():
    modules = {}
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join(("dipole", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
            modules[name] = path
    waiting = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    while free := [name for name, needs in waiting.items() if not needs & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting, f"a cycle is among {sorted(waiting)}"
