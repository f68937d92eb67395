"""The pages that are generated from registry, suites, results and templates, and the install lines, which work."""

import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path
from statistics import mean, median

import committed
import evidence
import install
import links
import objectives
import pytest
import render
from scipy import stats

from dipole.benchmarks.statistics import power
from dipole.core.objectives.registry import registry
from tests import systems
from tests.runs import refused

ROOT = Path(__file__).resolve().parents[2]


def test_pages_have_formulas_and_facts_of_the_registry(monkeypatch):
    assert objectives.problems() == []
    page = objectives.page(registry.get("infonce"))
    for part in ("`temperature`", "LMCL Eq. 1", "nt_xent", "`dcl(rho=0)`", "lmcl-table1", "infonce-weights.svg"):
        assert part in page
    assert "0.1*dp" in objectives.page(registry.get("dp"))
    assert {name for name, _ in objectives.suites_of(registry.get("cllr"))} >= {"cllr-table1", "demo"}
    assert not any(name.startswith("cllr") for name, _ in objectives.suites_of(registry.get("blocks")))
    found = json.loads((ROOT / "benchmarks" / "results" / "learning-everywhere.json").read_text())
    rows = {row.split("|")[1].strip(): row for row in evidence.everywhere().splitlines()}
    assert f"{found['agent']['cacr']['0'][1]:.2f}" in rows["[`cacr`](../objectives/cacr.md)"]
    # A formula that changed is noticed.
    monkeypatch.setitem(objectives.ADDED, "dp", objectives.ADDED["dp"] | {"of": "R = 0"})
    monkeypatch.setitem(objectives.ADDED, "gone", {"of": "", "tex": []})
    first, second = objectives.problems()
    assert first.startswith("dp: its formula is now")
    assert second.startswith("gone: ")


def test_the_weights_drawn_are_those_of_the_formulas():
    drawing = pytest.importorskip("drawing", exc_type=ImportError)
    for tau in (0.1, 0.5):  # InfoNCE: the softmax
        cosines, weights = drawing.negative_weights(f"infonce(temperature={tau})")
        exponentials = [math.exp(s / tau) for s in cosines.tolist()]
        total = sum(exponentials) + math.exp(0.8 / tau)
        assert weights.tolist() == pytest.approx([e / total / tau for e in exponentials], rel=1e-6)
    cosines, weights = drawing.negative_weights("align_uniform(t=3)")
    ratios = (weights[1:] / weights[:-1]).log() / (cosines[1:] - cosines[:-1])
    assert ratios.tolist() == pytest.approx([6.0] * len(ratios))  # e^{-t ||x - y||^2} = e^{-2t + 2t s}
    cosines, weights = drawing.negative_weights("dp(delta_pos=0.1, delta_neg=0.5)")
    for s, weight in zip(cosines.tolist(), weights.tolist(), strict=True):
        distance = (1 - s) / 2
        if distance == pytest.approx(0.5):  # the end of the margin, of two slopes
            continue
        inside = 0.1 < distance < 0.5
        # g = (D - 0.1)(0.5 - D), dD / ds = -1 / 2, in the mean over 81 negatives: far ends of the margin go out.
        assert 81 * weight == pytest.approx(-0.1 * (0.6 - 2 * distance) / 2 if inside else 0, abs=1e-9)


def test_every_formula_and_picture_is_drawn():
    drawing = pytest.importorskip("drawing", exc_type=ImportError)
    for name, added in objectives.ADDED.items():
        assert drawing.formula(added["tex"]).lstrip().startswith(b"<?xml"), name
        if "option" in added:
            assert added["option"] in {option.name for option in registry.get(name).options}, name
            for value in added["values"]:
                text = drawing.spelled(name, added["option"], value, added.get("fixed", ""))
                assert float(drawing.negative_weights(text)[1].abs().max()) > 0, text
    assert drawing.whole() == drawing.whole()


def test_a_page_has_what_the_suites_found():
    lines = (KEPT / "cross-domain-small.jsonl").read_text().splitlines()
    runs = [found["record"] for found in map(json.loads, lines) if found.get("record")]
    measured: dict[str, dict[int, float]] = {"infonce": {}, "align_uniform": {}}
    for run in runs:
        name = run["objective"].removesuffix("(uniform_over=pairs)")
        if "next@10" in run["results"] and name in measured:
            measured[name][run["seed"]] = 100 * run["results"]["next@10"]
    gains = [measured["align_uniform"][seed] - value for seed, value in measured["infonce"].items()]
    page = committed.of_objective({"align_uniform"})
    assert len(gains) == 5
    assert f"`align_uniform` against `infonce`, pydoc: next sentence in ten: {mean(gains):+.3g} points" in page
    assert "`align_uniform` against" not in committed.of_objective({"infonce"})
    assert "cross-domain" not in committed.of_objective({"blocks"})
    assert committed.of_objective({"vicreg"}) == ""


def test_links_out_of_docs_lead_to_what_is_brought_along():
    text = "[a](../../CONTRIBUTING.md#x) [b](core.md) [c](../../examples) [d](https://x.org) [e](../gone.md)"
    moved = links.rewritten(text, "docs/background/rl.md", "background/rl.md")
    assert "[a](../project/contributing.md#x)" in moved
    assert "[b](core.md)" in moved
    assert "[c](../source/examples.md)" in moved
    assert "(https://x.org)" in moved
    assert "[e](../gone.md)" in moved  # a broken link stays one
    project = links.rewritten("[own](docs/how-to/own-losses.md)", "CONTRIBUTING.md", "project/contributing.md")
    assert project == "[own](../how-to/own-losses.md)"


KEPT = ROOT / "benchmarks" / "results" / "suites"


def test_templates_are_filled():
    assert render.filled("a {{ cross-domain:\n decided }} b {not} c") == "a 2 of 36 b {not} c"
    assert render.filled("{{ table: agents }}").startswith("| objective beside SAC")
    refused(KeyError, None, render.filled, "{{ table: nowhere }}")
    assert (render._p(0.0505), render._p(0.0474), render._p(0.0023)) == ("0.0505", "0.0474", "0.0023")


def test_check_names_the_page_that_differs(tmp_path, monkeypatch, capsys):
    templates = tmp_path / "docs" / "templates"
    templates.mkdir(parents=True)
    (templates / "page.md").write_text("{{ cross-domain: decided }} comparisons")
    (tmp_path / "README.md").write_text("# Title\n<!-- install: all -->\nearlier lines\n<!-- installed -->\nrest")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "TEMPLATES", templates)
    assert render.main(["--check"]) == 1
    assert "docs/page.md, README.md: differ" in capsys.readouterr().out
    assert render.main([]) == 0
    assert (tmp_path / "docs" / "page.md").read_text() == "2 of 36 comparisons"
    readme = (tmp_path / "README.md").read_text()
    assert '\npip install ".[all]"\n```\n<!-- installed -->\nrest' in readme
    assert "earlier lines" not in readme
    assert render.main(["--check"]) == 0


def values(suite: str, row: int, column: int, metric: str, factor: float = 100) -> dict[int, float]:
    """By seed, out of the file's own lines."""
    lines = map(json.loads, (KEPT / f"{suite}-small.jsonl").read_text().splitlines())
    found = {}
    for line in lines:
        for r, c, seed in line.get("cells", ()):
            if (r, c) == (row, column):
                found[seed] = factor * line["record"]["results"][metric]
    return found


def test_a_difference_is_a_paired_t_test():
    base, cacr = (values("cifar10-learning", row, 2, "knn/accuracy") for row in (0, 5))
    test = stats.ttest_rel([cacr[s] for s in range(3)], [base[s] for s in range(3)])
    low, high = test.confidence_interval(0.95)
    text = render.value_of("cifar10-learning: cacr, K = 4 - infonce @ kNN")
    value, *interval, p = map(float, re.findall(r"-?\d+(?:\.\d+)?(?:e-\d+)?", text))
    assert value == pytest.approx(sum(cacr[s] - base[s] for s in range(3)) / 3, abs=0.051)
    assert interval == [pytest.approx(low, abs=0.051), pytest.approx(high, abs=0.051)]
    assert p == pytest.approx(test.pvalue, rel=0.06)
    assert render.value_of("cifar10-learning: cacr, K = 4 @ kNN").startswith(text.partition(",")[0])
    assert float(render.value_of("cifar10-learning: mean cacr, K = 4 @ kNN")) == pytest.approx(
        sum(cacr.values()) / 3, abs=0.01
    )


def test_the_gain_of_polarization_is_a_paired_t_test():
    found = json.loads((KEPT.parent / "polarization.json").read_text())["text"]
    key = "+ 0.3*dp(delta_pos=0.1, delta_neg=0.5, reduction=anchor_sum)"
    seeds = sorted(found[key])
    pairs = [[found[name][seed]["trained"] for seed in seeds] for name in (key, "infonce")]
    low, high = stats.ttest_rel(*pairs).confidence_interval(0.95)
    text = render.value_of(f"polarization text: {key}")
    assert [float(x) for x in re.findall(r"-?\d\.\d+", text)[1:3]] == [pytest.approx(x, abs=1e-3) for x in (low, high)]


@pytest.mark.parametrize("of", ["x @ y", "claim z", "a - b @ c", "detectable x"])
def test_what_there_is_not_is_no_number(of):
    for suite in ("cross-domain", "nowhere"):
        refused((LookupError, StopIteration), None, render.value_of, f"{suite}: {of}")


def test_the_detectable_difference_has_the_unit_of_its_column():
    suite = render._suite("cross-domain")
    (cell,) = [each for each in suite.cells_of("dot: return") if each.row.label == "dcl"]
    test = cell.against_base
    assert test is not None
    assert power(cell.detectable, test.spread, test.n, 0.05 / cell.family, test.method != "Welch") == pytest.approx(0.8)
    rows = [each.detectable for each in suite.cells_of("dot: return") if each.against_base is not None]
    least = float(render.value_of("cross-domain: detectable dot: return").removesuffix(" return"))
    assert least == pytest.approx(median(rows), abs=0.005)


@pytest.mark.parametrize("what", ["decided", "p", "gain infonce", "infonce @ Easy", "infonce - none @ Easy", "claim x"])
def test_no_page_counts_a_suite_that_cannot_decide_anything(what):
    refused(LookupError, r"cannot decide anything.*8,000 environment steps", render.value_of, f"six-tasks: {what}")
    assert float(render.value_of("six-tasks: mean none @ Spin")) < 1


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


@systems.links
@pytest.mark.parametrize("address", ["", "https://host.example/group/dipole.git"])
def test_one_setting_gives_urls_and_clone_line(address, moved):
    text = (moved / "pyproject.toml").read_text(encoding="utf-8")
    text, found = re.subn(r'^repository = ".*?"', f'repository = "{address}"', text, flags=re.MULTILINE)
    assert found == 1
    (moved / "pyproject.toml").write_text(text, encoding="utf-8")
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
    assert install.block("all") in (ROOT / "README.md").read_text(encoding="utf-8")
    assert install.enter() in (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_installs_dipole_from_an_index(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"pip3? install[^\n`]*?[\s\"'](dipole)(\[|\"|'|\s|$)", text, re.MULTILINE)
    known = {*install.EXTRAS, ""}
    for wanted in re.findall(r"pip install [^\n`]*?\.\[([\w,-]+)\]", text):
        assert set(wanted.split(",")) <= known
