"""The site builds with every warning an error, and needs nothing from elsewhere to be read."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from dipole.core.objectives.registry import registry
from tests.benchmarks.test_browser import BROWSER, DRIVER, MISSING, Chromium
from tests.systems import links

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers", "mike", "jupytext", "stable_baselines3")
pytestmark = [
    pytest.mark.slow,  # `make docs` builds the site as well
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="needs what builds the site"),
]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DIPOLE_RUN_TUTORIALS": "false", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_objectives_functions_and_suites_have_their_pages(site):
    for entry in registry.entries():
        if entry.kind != "diagnostic" and entry.package == "dipole":
            page = (site / "objectives" / f"{entry.name}.html").read_text()
            assert f'src="{entry.name}-formula.svg"' in page
            assert (site / "objectives" / f"{entry.name}-formula.svg").is_file()
    page = (site / "reference" / "dipole.html").read_text()
    for name in ("dipole.objective", "dipole.Pairs", "dipole.cached", "dipole.register"):
        assert name in page
    assert "SpecError" in page
    overview = (site / "results" / "index.html").read_text()
    pages = {path.stem for path in (site / "results" / "suites").glob("*.html")}
    assert len(pages) > 40
    assert pages == set(re.findall(r'href="suites/([\w-]+)\.html"', overview))


def test_search_notebooks_and_tables_of_the_site(site):
    written = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(written[written.index("{") : written.rindex("}") + 1])["docs"]
    for title in ("Install", "Quickstart: images"):  # a title counts most in the search
        locations = [entry["location"] for entry in entries if entry["title"] == title]
        assert locations
        assert all(each.startswith("start/") for each in locations)
    for path in site.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*>", path.read_text()):
            if 'rel="canonical"' not in tag and 'rel="next"' not in tag and 'rel="prev"' not in tag:
                assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (path, tag)
    assert len(list((site / "tutorials").glob("*.ipynb"))) == 5
    # Tables of signatures in the reference are not ours.
    wide = {}
    for path in site.rglob("*.html"):
        if path.name != "report.html" and not {"reference", "report"} & set(path.relative_to(site).parts):
            for head in re.findall(r"<thead>(.*?)</thead>", path.read_text(), re.DOTALL):
                if (count := len(re.findall(r"<th[ >]", head))) > 6:
                    wide[path.relative_to(site).as_posix()] = count
    assert wide == {}


SCROLLING = """
  document.body.setAttribute('data-md-color-scheme', arguments[0]);
  const kinds = ['pre', 'pre > code', '.md-typeset__scrollwrap', '.md-typeset__table'];
  const boxes = document.querySelectorAll(kinds.map(kind => `.md-content ${kind}`).join());
  const wide = [...boxes].filter(box => box.offsetParent !== null && box.scrollWidth > box.clientWidth + 1
    && box.clientWidth > 0).map(box => box.textContent.trim().slice(0, 60));
  if (document.documentElement.scrollWidth > innerWidth) wide.push('page');
  return wide;
"""


@pytest.fixture(scope="module")
def chromium():
    if not (DRIVER and BROWSER):
        pytest.skip(MISSING)
    with closing(Chromium()) as found:
        yield found


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["default", "slate"], ids=["light", "dark"])
def test_no_code_or_table_scrolls_sideways(site, chromium, scheme, size):
    folders = ("start", "how-to", "tutorials", "objectives", "background", "results", "results/suites")
    pages = [path for folder in folders for path in sorted((site / folder).glob("*.html"))]
    assert len(pages) > 100
    wide = {}
    with chromium.sized(*size):
        for path in [site / "index.html", *pages]:
            chromium.open(path.as_uri())
            if found := chromium.run(SCROLLING, scheme):
                wide[path.name] = found
    assert wide == {}


@links
def test_a_broken_link_fails(tmp_path):
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
