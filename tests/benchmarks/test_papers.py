"""Every suite can be built, says what it does otherwise than its paper, and stands in docs/background/papers.md."""

import json
from pathlib import Path

import pytest

from dipole.benchmarks import papers as page
from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.protocol import deviations, differs, facts_of, leaves, papers
from dipole.benchmarks.plan import faults
from dipole.benchmarks.suite import read_suite, suites
from dipole.core.cli.app import main
from dipole.core.objectives.registry import registry
from dipole.core.train.recipe import load

DOCS = Path(__file__).parents[2] / "docs" / "background"
PAPERS = {"LMCL": "LMCL", "CACR": "CACR", "CLLR": "CLLR", "Arora et al. 2019": "Arora et al."}


@pytest.fixture(scope="module")
def paper_scale():
    """Every shipped suite of a published table or figure at scale paper."""
    found = [read_suite(name) for name in suites()]
    return [suite.at("paper") for suite in found if suite.published and "paper" in suite.scale]


@pytest.mark.parametrize("scale", ["small", pytest.param("paper", marks=pytest.mark.slow)])
def test_every_suite_can_be_built(scale):
    for name in suites():
        suite = read_suite(name)
        if scale in suite.scale:
            jobs = suite.at(scale, seeds=1).jobs()
            assert [str(fault) for fault in faults(jobs, suite.scale[scale].processes)] == [], name


@pytest.mark.parametrize(
    ("suite", "override", "cause"),
    [
        ("cacr-table7", "vision.encoder.tap=fc7", "vision.encoder.tap: ResNetEncoder has no layer 'fc7'"),
        ("lmcl-table3", "vision.data.pretrain_split=nothing", "stl10 has no split 'nothing'"),
        ("lmcl-table3", "train.batch_size=200000", "train.batch_size: 200000 is more than the 105000 images of stl10"),
        ("lmcl-table2", "vision.negatives=2000000", "vision.negatives: 2000000 of a memory bank"),
        ("arora-table2-text", "train.batch_size=401", "train.batch_size 401 must be a multiple of 3"),
        ("lmcl-table5", "rl.image_size=8", "images of 8 pixels are too small for 4 convolutions"),
        ("lmcl-table5", "rl.image_size=101", "image_size must be between 1 and the rendered size 100"),
    ],
)
def test_a_plan_names_what_cannot_be_built_and_its_cell(suite, override, cause, capsys, tmp_path):
    assert main(["bench", suite, "--scale", "paper", "--plan", "--runs", str(tmp_path), "--set", override]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if cause in line)
    sized = read_suite(suite).at("paper")
    row, column = next((row, column) for row, column, _ in sized.cells())
    if suite != "lmcl-table2":  # its first row has a bank, the second none
        assert line.startswith(f"cannot run: row {row.label!r}, column {column.name!r}, seed 0")


def test_objectives_that_pairs_do_not_carry_and_deviations_are_named():
    sized = read_suite("lmcl-table3").at("paper", ["vision.views=2"], seeds=1)
    config = load("stl10-simclr", ["objective=cacr(k=4)"]).config
    (job, *_) = sized.jobs()
    (fault,) = faults([type(job)(job.hash, config, job.recipe, job.overrides, job.cells)], 1)
    assert "4 positives" in fault.message or "k" in fault.message
    cells = [("SimCLR (CL)", "STL-10", {"vision.data.source": "stl10", "vision.method": "simclr"})]
    found = deviations("cacr-table6", cells)
    assert found["unlabelled images"] == "vision.data.pretrain_split: nothing in place of train+unlabeled"
    assert deviations("cacr-table5", []) == {}


def test_every_known_deviation_is_said_and_none_that_is_gone(paper_scale):
    covered = set()
    for sized in paper_scale:
        name, said = sized.suite.name, set(sized.scale.protocol)
        silent = {key: text for key, text in sized.unmet.items() if key not in said}
        assert not silent, f"{name}: [scale.paper.protocol] does not say {silent}"
        paper = papers()[sized.suite.published.partition("-")[0]]
        open_ones = {key for choice in paper.choices for key in choice.keys}
        facts = {fact.key for fact in facts_of(sized.suite.published)}
        gone = sorted((said & facts) - set(sized.unmet) - open_ones)
        assert not gone, f"{name}: [scale.paper.protocol] says what no longer differs: {gone}"
        assert [key for key in said if not paper.why(key)] == [], f"{name}: no reason in published/*.toml"
        cells = [
            (row.label, column.name, leaves(sized.configured(row, *sized.place(row, column, seed))))
            for row, column, seed in sized.cells()
            if seed == sized.seeds[0]
        ]
        covered |= {
            (fact.key, fact.tables, fact.rows, fact.columns, tuple(fact.when.items()))
            for fact in facts_of(sized.suite.published)
            if any(fact.covers(*cell) for cell in cells)
        }
    for paper in papers().values():
        for fact in paper.facts:
            key = (fact.key, fact.tables, fact.rows, fact.columns, tuple(fact.when.items()))
            assert key in covered, f"no cell is what {fact} is about"
            assert fact.settings or fact.by or fact.why, fact


def test_a_suite_that_is_silent_gets_no_verdict(paper_scale):
    for sized in paper_scale:
        if sized.suite.name in ("cacr-table2", "lmcl-table4"):
            scale = sized.scale.model_copy(update={"protocol": {}})
            mine = sized.suite.model_copy(update={"name": "mine", "scale": {"paper": scale}})
            assert set(sized.unmet) <= set(mine.at("paper").protocol)
            # At another scale, the same settings are held against the shipped suite and what it says.
            small = sized.suite.model_copy(update={"name": "mine", "scale": {"small": scale}})
            assert set(sized.protocol) <= set(small.at("small").protocol)


@pytest.mark.parametrize("name", ["lmcl-table5", "cllr-table4"])
def test_options_that_no_paper_names_are_said_of_the_control_tasks(name):
    assert any("rho" in key for key in read_suite(name).at("paper").protocol)


@pytest.mark.parametrize(
    ("wanted", "values", "lines"),
    [
        (0.1, [0.1, 0.1], 0),
        (0.1, [0.1, 0.2], 1),
        (1, [True], 1),
        ([155, 170], [[155.0, 170.0]], 0),
        ({"each": [1, 2]}, [1, 2, 1], 0),
        ({"each": [1, 2]}, [1], 1),
        ({"each": [1, 2]}, [1, 2, 3], 1),
        ({"per": "b", "factor": 0.5}, [2.0], 0),
        ({"per": "b", "factor": 0.25}, [2.0], 1),
        ({"absent": True}, [None], 0),
        ({"absent": True}, [3], 1),
    ],
)
def test_rules_of_settings(wanted, values, lines):
    assert len(list(differs("a", wanted, [{"a": value, "b": 4} for value in values]))) == lines


def test_the_page_of_the_papers_is_what_the_suites_say(tmp_path, capsys):
    assert page.main(["--check", str(DOCS / "papers.md")]) == 0, "run `python -m dipole.benchmarks.papers`"
    stale = tmp_path / "papers.md"
    stale.write_text("something else\n")
    assert page.main(["--check", str(stale)]) == 1
    assert "make pages" in capsys.readouterr().out
    assert page.main([str(stale)]) == 0
    assert page.main(["--check", str(stale)]) == 0


def test_every_table_figure_and_theorem_has_a_row():
    text = page.page()
    for paper in published.PAPERS:
        names = [row.name for row in page.lines_of(paper)]
        assert len(set(names)) == len(names), paper
        printed = [table.paper_table for table in published.tables().values() if table.paper == paper]
        drawn = [each.id.rpartition("figure")[2] for each in published.figures().values() if each.paper == paper]
        printed += [f"Figure {number}" for number in drawn]
        assert [label for label in printed if not any(name.startswith(label) for name in names)] == [], paper
    rows = ("Lemma 4.3", "Theorem 6.1", "Proposition 6.2", "Eq. 5", "Theorem 4 ", "Property 1", "Lemma 3 ", "Table 18")
    for name in rows:
        assert f"| {name}" in text, name


def test_what_differs_from_each_paper_is_shown(capsys):
    for kind in ("objective", "regularizer"):
        for entry in registry.entries(kind):
            if entry.target.__module__.startswith("dipole."):
                named = [paper for paper, short in PAPERS.items() if short in entry.source]
                assert set(named) <= set(entry.deviations), entry.name
    assert main(["show", "dp"]) == 0
    assert "deviations from LMCL" in capsys.readouterr().out
    assert main(["show", "quickthoughts", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deviations"]["LMCL"] == []
