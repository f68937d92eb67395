"""Install lines come from one place, and work from a checkout."""

import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path

import install
import pytest

from tests.systems import links

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.py")]


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A copy of what a build reads, with an address in its setting."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("core", "dipole", "vision", "text", "rl", "benchmarks"):
        (tmp_path / package).symlink_to(ROOT / package)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    return tmp_path


def set_repository(folder: Path, address: str) -> None:
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    text, found = re.subn(r'^repository = ".*?"', f'repository = "{address}"', text, flags=re.MULTILINE)
    assert found == 1
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


@links
@pytest.mark.parametrize("address", ["", "https://host.example/group/dipole.git"])
def test_one_setting_gives_urls_and_clone_line(address, moved):
    set_repository(moved, address)
    (moved / "out").mkdir()
    build = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('out')"
    done = subprocess.run([sys.executable, "-c", build], cwd=moved, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (written,) = (moved / "out").glob("*.dist-info/METADATA")
    urls = message_from_string(written.read_text(encoding="utf-8")).get_all("Project-URL", [])
    assert urls == ([f"Repository, {address}"] if address else [])
    lines = install.block("vision").splitlines()
    assert (f"git clone {address}" in lines) == bool(address)
    assert ("cd dipole" in lines) == bool(address)
    assert lines[-2] == 'pip install ".[vision]"'
    assert install.source() == (f"git+{address}" if address else "")


def test_every_extra_is_described_with_the_same_lines():
    assert install.EXTRAS.keys() == PROJECT["project"]["optional-dependencies"].keys()
    lines = install.block("all")
    assert lines in (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    assert install.enter() in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_installs_dipole_from_an_index(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"pip3? install[^\n`]*?[\s\"'](dipole)(\[|\"|'|\s|$)", text, re.MULTILINE)
    known = {*install.EXTRAS, ""}
    for wanted in re.findall(r"pip install [^\n`]*?\.\[([\w,-]+)\]", text):
        assert set(wanted.split(",")) <= known
