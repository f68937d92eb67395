"""The modules of core/train import only what their list names above them."""

import ast
from pathlib import Path

import dipole.core.train

FOLDER = Path(dipole.core.train.__file__).parent


def listed() -> list[str]:
    """Modules in the order of the package's docstring: the left column, separated by commas."""
    lines = (dipole.core.train.__doc__ or "").splitlines()
    return [
        name.strip()
        for line in lines
        if line.startswith("    ")
        for name in line[4:36].split("  ")[0].split(",")
        if name.strip()
    ]


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, inside functions and for type checking as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "dipole.core.train":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dipole.core.train."):
            found.add((node.module or "").split(".")[3])
    return found


def test_every_import_points_down() -> None:
    order = listed()
    assert sorted(order) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    for place, name in enumerate(order):
        up = imported(FOLDER / f"{name}.py") - set(order[:place])
        assert not up, f"{name} imports {up}"
