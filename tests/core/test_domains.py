"""Domains and shipped files as entry points declare them: whole, broken, taken, absent."""

from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace

import pytest

from dipole.core.train.domains import (
    Domain,
    adapter_class,
    broken_domains,
    domain_names,
    domains,
    find_domain,
    resolve,
    temporary_domain,
)
from dipole.core.train.recipe import resolve as resolve_recipe
from dipole.core.train.shipped import broken_folders, shipped
from dipole.core.utils import plugins
from dipole.core.utils.errors import ConfigError


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

    def declare(*points: EntryPoint, alone: bool = False) -> None:
        def found(group: str) -> list[EntryPoint]:
            others = [] if alone else own(group=group)
            return [*others, *(point for point in points if point.group == group)]

        monkeypatch.setattr(plugins, "entry_points", found)

    return declare


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "their_domains.py").write_text(
        "from dipole.core.train.domains import Domain\n"
        "GRAPHS = Domain('graphs', 'graphs', 'their_domains:Missing', extra='graphs')\n"
        "LACKING = Domain('lacking', 'lacking', 'their_lacking:Adapter', extra='graphs')\n"
        "BROKEN = Domain('broken', 'broken', 'their_broken:Adapter')\n"
        "VISION = Domain('vision', 'another', 'their_domains:Missing')\n"
        "NUMBER = 3\n"
    )
    (tmp_path / "their_lacking.py").write_text("import a_package_that_is_absent\n")
    (tmp_path / "their_broken.py").write_text("import their_broken.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_own_domains_are_declared_with_all_that_is_known():
    found = domains()
    assert found.keys() >= {"vision", "text", "rl", "toy"}
    assert (list(found), broken_domains()) == (domain_names(), [])
    for name, domain in found.items():
        assert (domain.name, domain.package) == (name, "dipole")
        assert domain.summary
        assert not domain.summary.startswith("dipole.")
        assert adapter_class(name).domain == name
        assert all(callable(resolve(probe)) for probe in domain.probes.values())


def test_what_is_wrong_with_a_domain_is_said(theirs, declared):
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
        with pytest.raises(ConfigError, match=said):
            find_domain(name)


def test_a_missing_package_is_named_with_the_line_that_installs_it(theirs, declared):
    declared(*declared_by("theirs", "domains", lacking="their_domains:LACKING", broken="their_domains:BROKEN"))
    said = r"needs the package 'a_package_that_is_absent'.*pip install \"theirs\[graphs\]\""
    with pytest.raises(ConfigError, match=said):
        adapter_class("lacking")
    with pytest.raises(ModuleNotFoundError, match="their_broken"):
        adapter_class("broken")  # a mistake of its own, which no installation cures


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [("their_slip:A", "SyntaxError"), ("their_domains:Nothing", "AttributeError"), ("their_exit:A", "SystemExit: bye")],
)
def test_a_broken_adapter_is_named_with_its_domain(adapter, reason, theirs, tmp_path, monkeypatch):
    (tmp_path / "their_slip.py").write_text("def f(:\n")
    (tmp_path / "their_exit.py").write_text("import sys\nsys.exit('bye')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        temporary_domain(Domain("graphs", "graphs", adapter, package="theirs")),
        pytest.raises(ConfigError, match=rf"the domain 'graphs' of theirs: its adapter '{adapter}'.*{reason}"),
    ):
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


def test_an_installation_without_entry_points_is_no_riddle(declared):
    declared(alone=True)
    said = r"unknown domain 'vision': not even dipole's own are known.*Install it again"
    with pytest.raises(ConfigError, match=said):
        find_domain("vision")


@pytest.mark.parametrize("name", ["train", "seed", "objective", "settings", "hash"])
def test_a_domain_is_not_called_as_something_else_of_a_recipe(name):
    with temporary_domain(Domain(name, "points", "blobs_domain:BlobsAdapter")), pytest.raises(ConfigError) as error:
        resolve_recipe({"domain": name, "train": {"steps": 1}})
    assert f"domain: {name!r} is taken" in str(error.value)


def test_a_temporary_domain_is_forgotten():
    mine = Domain("mine", "mine", "dipole.core.train.adapter:Adapter")
    with temporary_domain(mine):
        assert find_domain("mine") is mine
        assert domains()["mine"] is mine
        assert "mine" in domain_names()
    assert "mine" not in domain_names()


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
