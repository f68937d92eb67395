"""`dipole new`: what it writes installs, and passes its own tests as written."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dipole.core.cli import main

INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
RUN = "import sys; from dipole.core.cli import main; main(['show', sys.argv[1]]); import pytest; "
RUN += "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[2:]]))"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of a new package and of a new domain, both installed into its `site`."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("made")
    assert main(["new", "My-Objectives", "--into", str(folder)]) == 0
    assert main(["new", "--domain", "My-Rings", "--into", str(folder)]) == 0
    both = [folder / "My-Objectives", folder / "My-Rings"]
    subprocess.run([*INSTALL, "--target", folder / "site", *both], check=True, capture_output=True, text=True)
    return folder


QUICK = "not compile and not ranks and not size"


@pytest.mark.parametrize(
    ("name", "shown", "said", "chosen"),
    [
        pytest.param("My-Objectives", "my_objectives_spread", "My-Objectives 0.1.0", "", marks=pytest.mark.slow),
        ("My-Objectives", "my_objectives_spread", "My-Objectives 0.1.0", QUICK),
        ("My-Rings", "my_rings", "my_rings", ""),
    ],
)
def test_what_is_new_installs_and_passes_its_own_tests(made, name, shown, said, chosen):
    for path in (made / name).rglob("*.*"):
        ours = ("actions/checkout@", "actions/setup-python@", "@torch", "@pytest", "@register", "@parametrize")
        text = path.read_text() if path.is_file() and path.suffix != ".pyc" else ""
        assert name == "My-Objectives" or "@" not in re.sub("|".join(ours), "", text), path
    done = subprocess.run(
        [sys.executable, "-c", RUN, shown, "-k", chosen],
        env=os.environ | {"PYTHONPATH": str(made / "site")}, cwd=made / name, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


def test_it_is_clean_and_every_mark_is_filled_in(tmp_path, capsys):
    assert main(["new", "more_losses", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "more_losses"
    named = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))]
    written = sorted(path for path in folder.rglob("*") if path.is_file())
    assert sorted(named) == written
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert not re.search("@(name|package)@", text), path
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


NO_NAMES = [
    *["", "1st", "a--b", "my losses", "a/b", "../up", "-x", "os", "class", "dipole", "x" * 61],
    *["con", "AUX", "com1", "Tests", "this"],  # devices of Windows, a folder of the package's own, Python's
    *["numpy", "SciPy", "scikit-learn", "sklearn", "torch", "pytest", "setuptools", "ruff", "dm-control"],
]
NO_DOMAINS = ["vision", "rl", "train", "objective", "seed", "numpy", "a--b"]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        *((name, [], "such as my-objectives") for name in NO_NAMES),
        *((name, ["--domain"], repr(name)) for name in NO_DOMAINS),
    ],
)
def test_a_name_that_is_none_is_one_message_and_writes_nothing(name, options, said, tmp_path, capsys):
    assert main(["new", *options, "--into", str(tmp_path), "--", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
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
    assert "--out" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())
