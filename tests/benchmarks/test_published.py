"""Printed tables, verdicts and claims against the counts of the data files; deviations; the page of the papers."""

import json
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path

import pytest
from scipy import stats

from dipole.benchmarks import papers as page
from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import judge_claim
from dipole.benchmarks.claims.protocol import deviations, differs, facts_of, leaves, papers, protocol_differences
from dipole.benchmarks.claims.published import Claim, PrintedCell, claims, figures, table, tables
from dipole.benchmarks.claims.verdicts import (
    AGREES,
    DIFFERS,
    NO_DATA,
    NO_TEST,
    NOT_COMPARED,
    UNDECIDED,
    among,
    compare,
    margin,
)
from dipole.benchmarks.plan import faults
from dipole.benchmarks.statistics import summarize
from dipole.benchmarks.suite import read_suite, suites
from dipole.core.cli.app import main
from dipole.core.objectives.registry import registry
from dipole.core.train.recipe import load
from dipole.core.utils.errors import DataError


def test_published_tables_hold_the_known_cells():
    assert len(tables()) == 29
    assert {"lmcl-table5", "cacr-table17", "cllr-table1", "arora-table2-text"} <= tables().keys()
    assert {"lmcl-figure2", "cacr-figure3", "cllr-figure4", "arora-figure2"} <= figures().keys()
    for found in tables().values():
        assert len({row.label for row in found.rows}) == len(found.rows)
        assert all(set(row.cells) == set(found.columns) for row in found.rows)
    catch = table("lmcl-table5").find("LMCL(CURL+DP)").cells["Catch"]
    assert (catch.mean, catch.std) == (842, 27)
    assert table("lmcl-table5").trials == 3
    assert table("lmcl-table4").trials is None
    row = "MoCoV2 / WebVision v1"
    assert table("cacr-table4").value(row, "top1") == table("cacr-table4").find(row).cells["top1"].mean
    with pytest.raises(DataError, match="lmcl-table4"):
        table("lmcl-tabel4")
    assert table("lmcl-table5").find("SAC") is None
    assert margin("accuracy %", 80) == 1
    assert margin("GPU seconds per iteration", 2.0) == pytest.approx(0.2)
    assert all(margin(t.metric, 1.0) > 0 for t in tables().values())
    with pytest.raises(DataError):
        margin("bananas", 1)


def test_exchanged_columns_missing_rows_and_other_protocols():
    assert "SUBJ and MPQA" in table("lmcl-table4").notes[0]
    assert "SUBJ and MPQA" in table("cllr-table2").notes[0]
    assert all("SUBJ and MPQA are" not in note for note in table("lmcl-table5").notes)
    outcome = judge_claim(CLAIM, {"t": Ours({("base", "A"): [1.0, 2.0], ("new", "A"): [2.0, 3.5]})})
    assert (len(outcome.items), outcome.missing) == (1, 1)
    assert judge_claim(CLAIM, {}).verdict == NO_DATA
    assert judge_claim(Claim("y", "p", "s", "w", "text"), {}).verdict == NO_TEST
    ours = summarize([75.1, 75.2, 75.0])
    assert compare(PrintedCell(75.0), None, ours, "accuracy %", False).verdict == NOT_COMPARED
    assert compare(PrintedCell(None), None, ours, "accuracy %", True) is None
    paper = {"dataset": "CIFAR-10", "epochs": 200}
    assert protocol_differences(paper, {"dataset": "CIFAR-10", "epochs": 200}) == []
    lines = protocol_differences(paper, {"dataset": "digits", "epochs": 200, "encoder": "small"})
    assert lines == ["dataset: digits (paper: CIFAR-10)", "encoder: small (paper: not stated)"]


@pytest.mark.parametrize("claim", claims(), ids=lambda c: c.id)
def test_claims_on_the_printed_numbers_give_the_stated_counts(claim):
    """The data files state the outcome of every test on the printed numbers."""
    for test in claim.tests:
        outcome = judge_claim(Claim(claim.id, "", "", "", "", (test,)), tables())
        stated = test["published"]
        assert outcome.missing == 0  # a printed dash, as in rows of cacr-c31, is no comparison
        if "hold" in stated:
            assert (sum(item.holds for item in outcome.items), len(outcome.items)) == (stated["hold"], stated["of"])
        for name in ("difference", "ratio"):
            if name in stated:
                assert {i.label: i.value for i in outcome.items} == pytest.approx(stated[name], abs=1e-4)
        if "steps" in stated:
            assert [i.value for i in outcome.items] == pytest.approx(stated["steps"])
        if "spread" in stated:
            assert outcome.items[0].value == pytest.approx(stated["spread"])


@dataclass
class Ours:
    """A grid of values by seed for each (row, column)."""

    cells: dict
    columns: tuple = ("A", "B")
    rows: tuple = field(default=())

    def value(self, row, column, kind="mean"):
        values = self.cells.get((row, column))
        return None if values is None else sum(values) / len(values)

    def samples(self, row, column, kind="mean"):
        values = self.cells.get((row, column))
        return None if values is None else dict(enumerate(values))


TEST = {"kind": "compare", "table": "t", "a": "new", "b": "base", "op": ">", "columns": "all"}
CLAIM = Claim("x", "p", "new beats base", "Table 1", "text", (TEST,))


def test_a_claim_is_supported_contradicted_or_open():
    base = {("base", "A"): [70.0, 70.3, 70.1, 70.2], ("base", "B"): [50.0, 51.0, 52.0, 53.0]}

    def verdict(a, b):
        return judge_claim(CLAIM, {"t": Ours({**base, ("new", "A"): a, ("new", "B"): b})}).verdict

    assert verdict([72.0, 72.4, 72.1, 72.2], [50.3, 51.2, 53.0, 52.9]) == AGREES
    assert verdict([68.0, 68.4, 68.1, 68.2], [50.3, 51.2, 53.0, 53.9]) == DIFFERS
    assert verdict([70.0, 70.9, 69.8, 70.3], [50.3, 51.2, 53.0, 52.9]) == UNDECIDED


def test_both_spreads_give_welch_and_one_run_borrows_the_printed_spread():
    printed = PrintedCell(842.0, 27.0)
    ours = summarize([820.0, 860.0, 835.0])
    assert compare(printed, 3, ours, "score at 100K steps", True).basis == "Welch"
    alone = compare(PrintedCell(842.0), None, ours, "score at 100K steps", True)
    assert alone.low < alone.difference < alone.high
    single = compare(printed, 3, summarize([500.0]), "score at 100K steps", True)
    assert single.verdict == DIFFERS
    assert single.low < single.difference < single.high < 0
    bare = compare(PrintedCell(842.0), None, summarize([842.0]), "score at 100K steps", True)
    assert bare.verdict == UNDECIDED
    assert isnan(bare.low)


@pytest.mark.parametrize("level", [75.4, 78.0])
def test_the_same_value_for_every_seed_is_no_spread_to_judge_by(level):
    found = compare(PrintedCell(75.0), None, summarize([level] * 3), "accuracy %", True)
    assert found.verdict == UNDECIDED
    assert isnan(found.low)
    # With a printed spread there is one.
    assert compare(PrintedCell(75.0, 0.5), 5, summarize([78.0] * 3), "accuracy %", True).verdict == DIFFERS


def test_verdicts_beside_printed_numbers_are_one_family():
    cell = PrintedCell(80.0, 0.5)
    rows = [summarize([80.0 + shift, 81.0 + shift, 79.5 + shift, 80.4 + shift]) for shift in (3.0, 0.0, 0.0, 0.0, 0.0)]
    alone = [compare(cell, 5, ours, "accuracy (%)", True) for ours in rows]
    assert alone[0].verdict == DIFFERS
    error, df = _welch_error(rows[0], 0.5, 5)
    tails = [stats.t.sf((alone[0].difference + bound) / error, df) for bound in (-1, 1)]
    assert alone[0].p == pytest.approx(2 * sum(tails))
    assert among(alone[:1]) == alone[:1]
    most = int(0.05 / alone[0].p)
    kept = among([alone[0], *[alone[1]] * (most - 1), None])
    assert (kept[0].verdict, kept[-1]) == (DIFFERS, None)
    lost = among([alone[0], *[alone[1]] * most])
    assert lost[0].verdict == UNDECIDED
    assert ", differs alone (p = " in lost[0].basis


def _welch_error(ours, std, n):
    parts = [(ours.std**2 / ours.n, ours.n - 1), (std**2 / n, n - 1)]
    total = sum(part for part, _ in parts)
    return total**0.5, total**2 / sum(part**2 / df for part, df in parts)


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
            # At another scale, the same settings are compared with the shipped suite and its protocol.
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
