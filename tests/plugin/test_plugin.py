"""A third-party package, installed into a folder of its own, adds an objective that works like the built-in ones."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dipole.core.cli import main

EXAMPLE = Path(__file__).parent / "example"


# Several commands in one fresh interpreter, as importing torch takes longer than all of them together.
SCRIPT = """
import contextlib, io, json, sys
from dipole.core.cli import main
results = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def dipole(site: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command with `site` on the path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    split = [shlex.split(command) for command in commands]
    arguments = [sys.executable, "-c", SCRIPT, json.dumps(split)]
    done = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
    return [tuple(result) for result in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")  # the build writes next to the source
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", folder / "site", source], check=True, capture_output=True, text=True)
    return folder / "site"


CHECKS = ["reference", "gradcheck", "low temperature", "float16", "one anchor", "no negatives", "state", "tiled"]


def test_an_installed_package_adds_an_objective(site):
    listed, shown, checked, wrong = dipole(
        site,
        "list",
        "show decoupled --json",
        f"check 'decoupled(temperature=0.2) + 0.1*dp' --json --only {shlex.join(CHECKS)}",
        "check 'decoupled(temperature=-1)'",
    )
    assert "decoupled" in listed[1]
    facts = json.loads(shown[1])
    assert facts["source"] == "Yeh et al. 2022"
    assert [(o["name"], o["default"], o["range"]) for o in facts["options"]] == [("temperature", 0.1, "> 0")]
    (report,) = json.loads(checked[1])
    assert [row["outcome"] for row in report["checks"]] == ["ok"] * len(CHECKS), checked[1]
    assert checked[0] == 0
    assert wrong[0] == 2
    assert "temperature must be a number > 0, got -1" in wrong[2]
    assert "^" in wrong[2]


def test_a_broken_package_takes_nothing_else_with_it(site, tmp_path, capsys):
    assert main(["show", "decoupled"]) == 2  # here it is not installed
    assert "unknown name 'decoupled'" in capsys.readouterr().err
    broken = shutil.copytree(site, tmp_path / "site")
    # One plug-in cannot be imported, the other takes a name that is not free.
    information = broken / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dipole.objectives]\nsnapped = dipole_snapped\n")
    (broken / "dipole_snapped.py").write_text("import a_module_that_does_not_exist\n")
    module = broken / "dipole_decoupled.py"
    module.write_text(module.read_text().replace('"decoupled"', '"infonce"', 1))
    listed, snapped, taken, own = dipole(
        broken, "list", "check snapped", "check decoupled", "check infonce --only reference"
    )
    assert listed[0] == 0
    assert "infonce" in listed[1]
    assert snapped[0] == taken[0] == 2
    assert "a_module_that_does_not_exist" in snapped[2]
    assert "'infonce' is already registered" in taken[2]
    assert own[0] == 0
