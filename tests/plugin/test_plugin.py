"""A third-party package, installed into a folder of its own: what it adds works like what is built in."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dipole.core.cli import main
from dipole.core.objectives.registry import registry
from tests.ranks import run_python

EXAMPLE = Path(__file__).parent / "example"


# Several commands in one interpreter that has not imported dipole.
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
    split = [shlex.split(command) for command in commands]
    done = run_python("-c", SCRIPT, json.dumps(split), PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(EXAMPLE, folder / "source")  # the build writes next to the source
    built = "from setuptools import build_meta; from zipfile import ZipFile; ZipFile(build_meta.build_wheel('.'))"
    command = [sys.executable, "-c", f"{built}.extractall('../site')"]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return folder / "site"


CHECKS = ["reference", "gradcheck", "low temperature", "float16", "one anchor", "no negatives", "state", "tiled"]
CHECK = f"check 'decoupled(temperature=0.2) + 0.1*dp' --json --only {shlex.join(CHECKS)}"
WRONG = "check 'decoupled(temperature=-1)'"
COMMANDS = (
    "list", "show decoupled --json", CHECK, WRONG, "list domains --json", "list recipes --json", "show two-rings",
    "show rings --json", "doctor --json", "train two-rings --quiet --set rings.noise=0.2 --runs {runs}",
    "train two-rings --set rings.nose=0.2", "--help", "greet --help", "greet you", "gret you", "list commands --json",
    "list objectives --json", "list objectives",
)  # fmt: skip


@pytest.fixture(scope="module")
def answers(site, tmp_path_factory):
    """The folder of runs, and the answer to each of COMMANDS."""
    runs = tmp_path_factory.mktemp("runs")
    told = dipole(site, *(each.replace("{runs}", str(runs)) for each in COMMANDS))
    return runs, dict(zip(COMMANDS, told, strict=True))


def test_an_installed_package_adds_an_objective(answers):
    _, told = answers
    checked, wrong = told[CHECK], told[WRONG]
    assert "decoupled" in told["list"][1]
    facts = json.loads(told["show decoupled --json"][1])
    assert (facts["package"], facts["source"]) == ("dipole-example 0.1", "Yeh et al. 2022")
    assert [(o["name"], o["default"], o["range"]) for o in facts["options"]] == [("temperature", 0.1, "> 0")]
    (report,) = json.loads(checked[1])
    assert [row["outcome"] for row in report["checks"]] == ["ok"] * len(CHECKS), checked[1]
    assert (checked[0], wrong[0]) == (0, 2)
    assert "temperature must be a number > 0, got -1" in wrong[2]
    assert "^" in wrong[2]


def test_an_installed_package_adds_a_domain_with_its_recipe(answers):
    runs, told = answers
    listed, recipes, shown, table, doctor, trained, wrong = (told[command] for command in COMMANDS[4:11])
    (domain,) = [each for each in json.loads(listed[1])["domains"] if each["name"] == "rings"]
    said = "points on two rings, classified by their radius"
    assert (domain["summary"], domain["package"]) == (said, "dipole-example")
    (recipe,) = [each for each in json.loads(recipes[1])["recipes"] if each["name"] == "two-rings"]
    assert (recipe["domain"], recipe["summary"]) == ("rings", "Points on two rings")
    assert 'domain = "rings"' in shown[1]
    assert [row["name"] for row in json.loads(table[1])["settings"]] == ["points", "noise"]
    findings = {each["name"]: each for each in json.loads(doctor[1])}
    arithmetic = findings["rings: arithmetic"]
    assert (arithmetic["state"], arithmetic["detail"]) == ("ok", "circles are round")
    parts = "objectives: decoupled, domains: rings, commands: greet, recipes: example"
    assert findings["plug-in dipole-example 0.1"]["detail"] == parts
    assert trained[0] == 0, trained[2]
    (record,) = (json.loads((folder / "record.json").read_text()) for folder in runs.iterdir())
    assert (record["status"], record["objective"]) == ("done", "decoupled")
    assert wrong[0] == 2
    assert "Did you mean 'noise'?" in wrong[2]


def test_an_installed_package_adds_a_command(answers):
    overview, explained, greeted, near, listed = (answers[1][command] for command in COMMANDS[11:16])
    commands = {each["name"]: each for each in json.loads(listed[1])["commands"]}
    assert [commands[name]["package"] for name in ("greet", "train")] == ["dipole-example 0.1", "dipole"]
    assert re.search(r"^  greet +Decoupled InfoNCE, and points on rings \(by dipole-example 0\.1\)$", overview[1], re.M)
    assert "Greet somebody." in explained[1]
    assert greeted[:2] == (0, "hello you\n")
    assert near[0] == 2
    assert "Did you mean 'greet'?" in near[2]


def test_plugins_are_listed_with_their_package_and_can_be_left_out(site, answers, monkeypatch, capsys):
    listed, plain = (answers[1][command] for command in COMMANDS[16:])
    packages = {each["name"]: each["package"] for each in json.loads(listed[1])["objectives"]}
    assert (packages["decoupled"], packages["infonce"]) == ("dipole-example 0.1", "dipole")
    assert "(by dipole-example 0.1)" in plain[1]
    monkeypatch.setenv("DIPOLE_PLUGINS", "none")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(registry, "_loaded", False)  # entry points are read again
    given = ("list", "show decoupled", "--help", "doctor --json")
    told = [(main(command.split()), capsys.readouterr()) for command in given]
    (_, listed), (code, unknown), (_, overview), (_, doctor) = told
    assert not any(word in listed.out for word in ("decoupled", "rings", "greet"))
    assert "DIPOLE_PLUGINS=none" in listed.err
    assert "infonce" in listed.out
    assert code == 2
    assert "Plug-ins are switched off (DIPOLE_PLUGINS=none)" in unknown.err
    assert "greet" not in overview.out
    findings = {each["name"]: each for each in json.loads(doctor.out)}
    assert findings["plug-ins"]["detail"] == "switched off by DIPOLE_PLUGINS=none"
    monkeypatch.setenv("DIPOLE_PLUGINS", "some")
    assert main(["list"]) == 2
    assert "DIPOLE_PLUGINS must be none" in capsys.readouterr().err


ENTRY_POINTS = """
[dipole.objectives]
snapped = dipole_snapped
leaving = dipole_leaving
[dipole.domains]
bent = dipole_snapped:BENT
text = dipole_example.domain:RINGS
[dipole.commands]
leave = dipole_leaving:configure
[dipole.recipes]
gone = dipole_example:nowhere
"""


def test_a_broken_package_takes_nothing_else_with_it(site, tmp_path, capsys):
    assert main(["show", "decoupled"]) == 2  # here it is not installed
    assert "unknown name 'decoupled'" in capsys.readouterr().err
    broken = shutil.copytree(site, tmp_path / "site")
    # One plug-in cannot be imported, one leaves Python half way, the other takes a name that is not free.
    information = broken / "broken-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (broken / "dipole_snapped.py").write_text("import a_module_that_does_not_exist\n")
    (broken / "dipole_leaving.py").write_text(
        "import sys\nfrom dipole.core.objectives.registry import register\n"
        "@register('half', formula='0', source='none')\ndef half():\n    'Half.'\nsys.exit(3)\n"
    )
    module = broken / "dipole_example" / "decoupled.py"
    module.write_text(module.read_text().replace('"decoupled"', '"infonce"', 1))
    listed, snapped, taken, own, half, bent, overview, left, domains, doctor = dipole(
        broken, "list", "check snapped", "check decoupled", "check infonce --only reference", "show half", "show bent",
        "--help", "leave", "list domains", "doctor --json",
    )  # fmt: skip
    found = (listed, snapped, taken, own, half, bent, overview, left)
    assert [code for code, _, _ in found] == [0, 2, 2, 0, 2, 2, 0, 1]
    assert "infonce" in listed[1]
    assert "a_module_that_does_not_exist" in snapped[2]
    assert "'infonce' is already registered" in taken[2]
    missing = "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'"
    for what in (
        f"'snapped' of broken 1.0 (dipole.objectives: dipole_snapped): {missing}",
        "'leaving' of broken 1.0 (dipole.objectives: dipole_leaving): SystemExit: 3",
        f"'bent' of broken 1.0 (dipole.domains: dipole_snapped:BENT): {missing}",
        "'text' of broken 1.0 (dipole.domains: dipole_example.domain:RINGS): the name is taken by the package dipole",
        "'gone' of broken 1.0 (dipole.recipes: dipole_example:nowhere): there is no folder 'nowhere'",
    ):
        assert f"cannot be used: {what}" in listed[2]
    assert "unknown name 'half'" in half[2]
    assert "'leaving' of broken 1.0" in half[2]
    assert "'bent' of broken 1.0" in bent[2]
    assert "(by broken 1.0)" in overview[1]
    assert "'leave' of broken 1.0 (dipole.commands: dipole_leaving:configure): SystemExit: 3" in left[2]
    assert "rings" in domains[1]
    findings = {each["name"]: each for each in json.loads(doctor[1])}
    assert findings["plug-in broken 1.0: domains bent"]["fix"].endswith("pip uninstall broken")
    assert findings["plug-in broken 1.0: commands leave"]["detail"] == "SystemExit: 3"
    assert findings["plug-in dipole-example 0.1: objectives decoupled"]["state"] == "missing"
