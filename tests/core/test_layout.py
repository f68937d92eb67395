"""The shape of the package: what imports what, and what an import costs."""

import ast
import subprocess
import sys
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


def imported_folders(path):
    """Names X of `dipole.X` that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "dipole" and len(parts) > 1 and (ROOT / parts[1]).is_dir():
                yield parts[1]


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folders_import_only_what_they_may(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert set(imported_folders(path)) <= ALLOWED[folder], path


def test_core_is_never_imported_under_a_second_name():
    assert "core" not in sys.modules
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    assert node.module.split(".")[0] not in ALLOWED, path


@pytest.mark.parametrize(
    "code",
    ["import dipole", "from dipole.core.cli import main; main(['--help'])"],
)
def test_importing_and_help_load_no_torch(code):
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'sklearn', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
