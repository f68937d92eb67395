"""A tiny real domain for the tests of runs, and commands of dipole in processes of their own."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from dipole.core.cli import main
from dipole.core.train.domains import temporary_domain
from dipole.core.utils import plugins

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Path of a recipe of the blobs domain. The working directory is a fresh folder."""
    import blobs_domain

    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "blobs.toml"
    recipe.write_text(blobs_domain.RECIPE)
    with temporary_domain(blobs_domain.BLOBS):
        yield recipe


@pytest.fixture
def one_run(blobs: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Folder of a finished run of the blobs domain, in runs/ of the working directory."""
    assert main(["train", str(blobs), "--quiet"]) == 0
    capsys.readouterr()
    (folder,) = Path("runs").iterdir()
    return folder


@pytest.fixture
def command_of_a_package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EntryPoint]:
    """Declare an attribute of a module as the only command of a package."""

    def declare(name: str, value: object) -> EntryPoint:
        point = EntryPoint(name, "their_commands:ENTRY", "dipole.commands")
        monkeypatch.setitem(sys.modules, "their_commands", SimpleNamespace(ENTRY=value))
        monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
        return point

    return declare
