"""`dipole new`: what it writes installs, and passes its own tests as written."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dipole.core.cli import main

INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]


@pytest.mark.parametrize("chosen", [pytest.param("", marks=pytest.mark.slow), "not compile and not ranks and not size"])
def test_a_new_package_installs_and_passes_its_own_tests(tmp_path, chosen):
    pytest.importorskip("setuptools")
    assert main(["new", "My-Objectives", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "My-Objectives"
    subprocess.run([*INSTALL, "--target", tmp_path / "site", folder], check=True, capture_output=True, text=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run(
        [sys.executable, "-m", "dipole.core.cli", "show", "my_objectives_spread"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "My-Objectives 0.1.0" in shown.stdout, shown.stderr
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen],
        env=environment, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout
    assert " passed" in tests.stdout
    assert "failed" not in tests.stdout


def test_it_is_clean_and_every_mark_is_filled_in(tmp_path, capsys):
    assert main(["new", "more_losses", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "more_losses"
    named = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))]
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    assert sorted(named) == written
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert "@name@" not in text, path
        assert "@package@" not in text, path
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    for module in project["project"]["entry-points"]["dipole.objectives"].values():
        assert (folder / f"{module.replace('.', '/')}.py").is_file()
    ruff = [sys.executable, "-m", "ruff"]
    if subprocess.run([*ruff, "--version"], capture_output=True).returncode == 0:
        for command in (["check"], ["format", "--check"]):
            done = subprocess.run([*ruff, *command, "--no-cache", "."], cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "name",
    [
        *["", "1st", "a--b", "my losses", "a/b", "../up", "-x", "os", "class", "dipole", "x" * 61],
        *["con", "AUX", "com1", "Tests", "this"],  # devices of Windows, a folder of the package's own, Python's
        *["numpy", "SciPy", "scikit-learn", "sklearn", "torch", "pytest", "setuptools", "ruff", "dm-control"],
    ],
)
def test_a_name_that_is_none_is_one_message_and_writes_nothing(name, tmp_path, capsys):
    assert main(["new", "--into", str(tmp_path), "--", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "such as my-objectives" in error
    assert not list(tmp_path.iterdir())


def test_next_lines_can_be_typed_and_existing_places_are_left(tmp_path, capsys):
    assert main(["new", "mine", "--into", str(tmp_path / "my work")]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.partition("next:")[2].splitlines()]
    assert f'cd "{tmp_path / "my work" / "mine"}"' in lines
    assert 'pip install -e ".[dev]"' in lines
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["new", "mine", "--into", str(tmp_path)]) == 2
    assert f"{tmp_path / 'mine'} exists already" in capsys.readouterr().err
    assert main(["new", "mine", "--into", str(tmp_path / "file")]) == 2
    assert "--into" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())


def test_a_new_domain_installs_and_trains(tmp_path):
    pytest.importorskip("setuptools")
    assert main(["new", "--domain", "My-Rings", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "My-Rings"
    for path in folder.rglob("*.*"):
        assert not path.is_file() or "@" not in path.read_text().replace("actions/checkout@", "").replace(
            "actions/setup-python@", ""
        ).replace("@torch", "")
    subprocess.run([*INSTALL, "--target", tmp_path / "site", folder], check=True, capture_output=True, text=True)
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout


@pytest.mark.parametrize("name", ["vision", "rl", "train", "objective", "seed", "numpy", "a--b"])
def test_a_name_that_no_domain_can_have(name, tmp_path, capsys):
    assert main(["new", "--domain", name, "--into", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert repr(name) in error
    assert not list(tmp_path.iterdir())
