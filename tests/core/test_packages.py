"""Packages of others: domains and files as entry points declare them, and what `dipole new` writes."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from runs import done, refused

from dipole.core.cli import main
from dipole.core.train import domains as home
from dipole.core.train.domains import Domain, adapter_class, broken_domains, domain_names, domains, find_domain
from dipole.core.train.recipe import resolve as resolve_recipe
from dipole.core.utils import plugins
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.plugins import broken_folders, shipped
from tests.ranks import run_python
from tests.runs import refused as fails
from tests.systems import file_limit


class Package(SimpleNamespace):
    """As much of a distribution as is looked at, which is hashable like one."""

    __hash__ = object.__hash__


def declared_by(name: str, kind: str, **points: str) -> list[EntryPoint]:
    """Entry points of a distribution that is not installed."""
    package = Package(name=name, version="2.0")
    return [EntryPoint(each, value, f"dipole.{kind}")._for(package) for each, value in points.items()]


@pytest.fixture
def declared(monkeypatch):
    """Declare entry points beside dipole's own."""
    own = plugins.entry_points

    def declare(*points: EntryPoint) -> None:
        def found(group: str) -> list[EntryPoint]:
            return [*own(group=group), *(point for point in points if point.group == group)]

        monkeypatch.setattr(plugins, "entry_points", found)

    return declare


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    files = {
        "their_domains": "from dipole.core.train.domains import Domain\n"
        "GRAPHS = Domain('graphs', 'graphs', 'their_domains:Missing', extra='graphs')\n"
        "VISION = Domain('vision', 'another', 'their_domains:Missing')\nNUMBER = 3\n",
        "their_lacking": "import a_package_that_is_absent\n",
        "their_broken": "import their_broken.part\n",
        "their_slip": "def f(:\n",
        "their_exit": "import sys\nsys.exit('bye')\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def test_own_domains_are_declared_with_all_that_is_known():
    found = domains()
    assert found.keys() >= {"vision", "text", "rl", "toy"}
    assert (list(found), broken_domains()) == (domain_names(), [])
    for name, domain in found.items():
        assert (domain.name, domain.package) == (name, "dipole")
        assert domain.summary[:7] not in ("", "dipole.")
        assert adapter_class(name).domain == name
        assert all(callable(resolve_name(probe)) for probe in domain.probes.values())


def test_what_is_wrong_with_a_domain_is_said(theirs, declared, monkeypatch):
    named = {"graphs": "GRAPHS", "trees": "GRAPHS", "vision": "VISION", "number": "NUMBER"}
    declared(*declared_by("theirs", "domains", **{name: f"their_domains:{value}" for name, value in named.items()}))
    assert domains()["vision"].adapter.startswith("dipole.")
    assert domains()["graphs"].package == "theirs"
    assert {error.point.name: error.reason for error in broken_domains()} == {
        "trees": "the Domain it names is called 'graphs'; both need one name.",
        "vision": "the name is taken by the package dipole.",
        "number": "it names something of type int, not a dipole.core.train.domains.Domain.",
    }
    number = r"the domain 'number' of theirs 2.0 \(dipole.domains: their_domains:NUMBER\)"
    for name, said in (("number", number), ("grphs", r"unknown domain 'grphs'. Did you mean 'graphs'\? Allowed: rl")):
        fails(ConfigError, said, find_domain, name)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])  # an installation without entry points
    fails(ConfigError, "'vision': not even dipole's own are known.*Install it again", find_domain, "vision")


@pytest.mark.parametrize(("module", "error", "said"), [
    ("their_lacking", ConfigError, r"the package 'a_package_that_is_absent'.*pip install \"theirs\[graphs\]\""),
    ("their_broken", ModuleNotFoundError, "their_broken"),  # a mistake of its own, which no installation cures
    ("their_slip", ConfigError, "domain 'graphs' of theirs: its adapter 'their_slip:A'.*SyntaxError"),
    ("their_domains", ConfigError, "domain 'graphs' of theirs: its adapter 'their_domains:A'.*AttributeError"),
    ("their_exit", ConfigError, "domain 'graphs' of theirs: its adapter 'their_exit:A'.*SystemExit: bye"),
])  # fmt: skip
def test_a_broken_adapter_is_named_with_its_domain_and_a_missing_package(module, error, said, theirs):
    mine = Domain("graphs", "graphs", f"{module}:A", extra="graphs", package="theirs")
    with home.temporary_domain(mine), pytest.raises(error, match=said):
        adapter_class("graphs")


def test_what_is_installed_is_read_once_and_again_when_something_came(tmp_path, monkeypatch):
    read = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "entry_points", lambda group: read.append(group) or entry_points(group=group))
    for _ in range(3):
        assert "late" not in domain_names()
    assert len(read) == 1
    information = tmp_path / "late-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dipole.domains]\nlate = late:LATE\n")
    assert "late" in domain_names()


def test_a_temporary_domain_is_forgotten_and_is_not_called_as_something_else_of_a_recipe():
    mine = Domain("mine", "mine", "dipole.core.train.adapter:Adapter")
    with home.temporary_domain(mine):
        assert find_domain("mine") is domains()["mine"] is mine
        assert "mine" in domain_names()
    assert "mine" not in domain_names()
    fails(ConfigError, "add_domain takes a Domain.*got 'mine'", home.add_domain, "mine")
    for name in ("train", "seed", "objective", "settings", "hash"):
        theirs = home.temporary_domain(Domain(name, "points", "blobs_domain:BlobsAdapter"))
        with theirs, pytest.raises(ConfigError, match=f"domain: {name!r} is taken"):
            resolve_recipe({"domain": name, "train": {"steps": 1}})


def test_files_of_a_package_stand_beside_the_shipped_ones(tmp_path, monkeypatch, declared):
    folder = tmp_path / "their_files" / "recipes"
    folder.mkdir(parents=True)
    # Nothing of the package is imported.
    (folder.parent / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "theirs.toml").write_text("")
    (folder / "digits-simclr.toml").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    own = shipped("recipes")
    declared(*declared_by("theirs", "recipes", a="their_files:recipes", b="their_files:suites", c="absent:recipes"))
    assert shipped("recipes") == own | {"theirs": folder / "theirs.toml"}
    assert [error.reason for error in broken_folders("recipes")] == [
        "these names are taken by other packages: digits-simclr.",
        "there is no folder 'suites' in a package 'their_files'.",
        "there is no folder 'recipes' in a package 'absent'.",
    ]
    assert broken_folders("suites") == broken_folders("published") == []


INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
RUN = (
    "import sys; from dipole.core.cli import main; main(['show', 'my_objectives_spread']); main(['show', 'my_rings']); "
)
RUN += "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"


@pytest.mark.parametrize("chosen", [
    pytest.param("", marks=pytest.mark.slow), "trains or it_ or reference or gradcheck or state",
])  # fmt: skip
def test_what_is_new_installs_and_passes_its_own_tests(tmp_path, chosen):
    """A new package and a new domain, both installed into one folder."""
    pytest.importorskip("setuptools")
    both = [tmp_path / "My-Objectives", tmp_path / "My-Rings"]
    assert main(["new", both[0].name, "--into", str(tmp_path)]) == 0
    assert main(["new", "--domain", both[1].name, "--into", str(tmp_path)]) == 0
    subprocess.run([*INSTALL, "--target", tmp_path / "site", *both], check=True, capture_output=True, text=True)
    for path in both[1].rglob("*.*"):
        ours = ("actions/checkout@", "actions/setup-python@", "@torch", "@pytest", "@register", "@parametrize")
        text = path.read_text() if path.is_file() and path.suffix != ".pyc" else ""
        assert "@" not in re.sub("|".join(ours), "", text), path
    ended = run_python("-c", RUN, *both, "-k", chosen, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(said in ended.stdout for said in ("My-Objectives 0.1.0", "my_rings"))
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert (int(passed[1]) >= 9, "failed" in ended.stdout) == (True, False)


def test_it_is_clean_and_every_mark_is_filled_in(tmp_path, capsys):
    folder = tmp_path / "more_losses"
    out = done(capsys, "new", "more_losses", "--into", tmp_path)
    named = [Path(line) for line in out.splitlines() if line.startswith(str(tmp_path))]
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
    if find_spec("ruff") is not None:
        for command in (["check"], ["format", "--check"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
            ended = subprocess.run(ruff, cwd=folder, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stdout


NO_NAMES = [
    *["", "1st", "a--b", "my losses", "a/b", "../up", "-x", "os", "class", "dipole", "x" * 61],
    *["con", "AUX", "com1", "Tests", "this"],  # devices of Windows, a folder of the package's own, Python's
    *["numpy", "SciPy", "scikit-learn", "sklearn", "torch", "pytest", "setuptools", "ruff", "dm-control"],
]


def test_a_name_that_is_none_is_one_message_and_writes_nothing(tmp_path, capsys):
    no_domains = "vision", "rl", "train", "objective", "seed", "numpy", "a--b"
    for name in (*NO_NAMES, *no_domains):
        options, said = (["--domain"], repr(name)) if name in no_domains else ([], "such as my-objectives")
        error = refused(capsys, "new", *options, "--into", tmp_path, "--", name)
        assert (error.count("\n"), said in error) == (1, True), error
    assert not list(tmp_path.iterdir())


def test_next_lines_can_be_typed_and_existing_places_are_left(tmp_path, capsys):
    out = done(capsys, "new", "mine", "--into", tmp_path / "my work")
    lines = [line.strip() for line in out.partition("next:")[2].splitlines()]
    assert f'cd "{tmp_path / "my work" / "mine"}"' in lines
    assert 'pip install -e ".[dev]"' in lines
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'mine'} exists already" in refused(capsys, "new", "mine", "--into", tmp_path)
    assert "--out" in refused(capsys, "new", "mine", "--into", tmp_path / "file")
    assert not list((tmp_path / "mine").iterdir())
    with file_limit(300):
        assert "The file size limit is reached" in refused(capsys, "new", "other", "--into", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "mine", "my work"}
