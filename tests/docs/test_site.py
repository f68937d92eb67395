"""The site builds with every warning an error, and needs nothing from elsewhere to be read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dipole.core.objectives.registry import registry
from tests.systems import links

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")
pytest.importorskip("mike")
pytest.importorskip("jupytext")
pytest.importorskip("stable_baselines3")


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DIPOLE_RUN_TUTORIALS": "false", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_objective_has_a_page_with_its_formula(site: Path) -> None:
    for entry in registry.entries():
        if entry.kind != "diagnostic" and entry.package == "dipole":
            page = (site / "objectives" / f"{entry.name}.html").read_text()
            assert f'src="{entry.name}-formula.svg"' in page
            assert (site / "objectives" / f"{entry.name}-formula.svg").is_file()


def test_the_reference_has_the_arguments_of_a_public_function(site: Path) -> None:
    page = (site / "reference" / "dipole.html").read_text()
    for name in ("dipole.objective", "dipole.Pairs", "dipole.cached", "dipole.register"):
        assert name in page
    assert "SpecError" in page


def test_search_and_pages_work_without_a_network(site: Path) -> None:
    assert (site / "search" / "search_index.js").is_file()
    for path in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", path.read_text()):
            if 'rel="canonical"' not in tag and 'rel="next"' not in tag and 'rel="prev"' not in tag:
                assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (path, tag)


def test_tutorials_can_be_taken_as_notebooks(site: Path) -> None:
    assert len(list((site / "tutorials").glob("*.ipynb"))) == 5


@links
@pytest.mark.slow
def test_a_broken_link_fails(tmp_path: Path) -> None:
    broken = tmp_path / "docs"
    broken.mkdir()
    for path in (ROOT / "docs").iterdir():
        if path.name != "index.md":
            (broken / path.name).symlink_to(path)
    (broken / "index.md").write_text((ROOT / "docs" / "index.md").read_text() + "\n[nowhere](gone.md)\n")
    config = tmp_path / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {broken}")
    config.write_text(text.replace("docs/generate", f"{ROOT}/docs/generate").replace("paths: [.]", f"paths: [{ROOT}]"))
    done = build(tmp_path / "site", config)
    assert done.returncode != 0
    assert "gone.md" in done.stderr
