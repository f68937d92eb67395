"""Printed tables and claims against the counts of the data files. Deviations. Suites that cannot decide anything."""

import json
from dataclasses import replace
from math import isfinite, isnan
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dipole.benchmarks import papers as page
from dipole.benchmarks.claims import published, verdicts
from dipole.benchmarks.claims.judge import judge_claim, why
from dipole.benchmarks.claims.protocol import deviations, differs, facts_of, leaves, papers, protocol_differences
from dipole.benchmarks.claims.published import Claim, PrintedCell
from dipole.benchmarks.claims.verdicts import DIFFERS, NO_DATA, NO_TEST, NOT_COMPARED, NOT_DECIDABLE, UNDECIDED
from dipole.benchmarks.plan import faults
from dipole.benchmarks.report import findings, tables
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.write import write_report
from dipole.benchmarks.results_file import SHIPPED, merged, read_results_file, write_results_file
from dipole.benchmarks.statistics import summarize
from dipole.benchmarks.suite import read_suite, suites
from dipole.benchmarks.suite_results import SuiteResults, gather
from dipole.core.cli.app import main
from dipole.core.objectives.registry import registry
from dipole.core.train.recipe import load_recipe
from dipole.core.utils.errors import DataError
from tests.benchmarks.claim_data import Grid


def test_published_tables_hold_the_known_cells():
    assert len(published.tables()) == 29
    assert {"lmcl-table5", "cacr-table17", "cllr-table1", "arora-table2-text"} <= published.tables().keys()
    assert {"lmcl-figure2", "cacr-figure3", "cllr-figure4", "arora-figure2"} <= published.figures().keys()
    for found in published.tables().values():
        assert len({row.label for row in found.rows}) == len(found.rows)
        assert all(set(row.cells) == set(found.columns) for row in found.rows)
    catch = published.table("lmcl-table5").find("LMCL(CURL+DP)").cells["Catch"]
    assert (catch.mean, catch.std) == (842, 27)
    assert [published.table(f"lmcl-table{number}").trials for number in (4, 5)] == [None, 3]
    table, row = published.table("cacr-table4"), "MoCoV2 / WebVision v1"
    assert table.value(row, "top1") == table.find(row).cells["top1"].mean
    with pytest.raises(DataError, match="lmcl-table4"):
        published.table("lmcl-tabel4")
    assert published.table("lmcl-table5").find("SAC") is None
    assert verdicts.margin("accuracy %", 80) == 1
    assert verdicts.margin("GPU seconds per iteration", 2.0) == pytest.approx(0.2)
    assert all(verdicts.margin(t.metric, 1.0) > 0 for t in published.tables().values())
    with pytest.raises(DataError):
        verdicts.margin("bananas", 1)


def test_exchanged_columns_missing_rows_and_other_protocols():
    assert "SUBJ and MPQA" in published.table("lmcl-table4").issues[0]
    assert "SUBJ and MPQA" in published.table("cllr-table2").issues[0]
    assert all("SUBJ and MPQA are" not in note for note in published.table("lmcl-table5").issues)
    test = {"kind": "compare", "table": "t", "a": "new", "b": "base", "op": ">", "columns": "all"}
    claim = Claim("x", "p", "new beats base", "Table 1", "text", (test,))
    cells = {("base", "A", "mean"): {0: 1.0, 1: 2.0}, ("new", "A", "mean"): {0: 2.0, 1: 3.5}}
    rows = [{"method": "base"}, {"method": "new"}]
    outcome = judge_claim(claim, {"t": Grid({"columns": ("A", "B"), "rows": rows}, cells)})
    assert (len(outcome.items), outcome.missing) == (1, 1)
    assert judge_claim(claim, {}).verdict == NO_DATA
    assert judge_claim(Claim("y", "p", "s", "w", "text"), {}).verdict == NO_TEST
    ours = summarize([75.1, 75.2, 75.0])
    assert verdicts.compare_printed(PrintedCell(75.0), None, ours, "accuracy %", False).verdict == NOT_COMPARED
    assert verdicts.compare_printed(PrintedCell(None), None, ours, "accuracy %", True) is None
    paper = {"dataset": "CIFAR-10", "epochs": 200}
    assert protocol_differences(paper, {"dataset": "CIFAR-10", "epochs": 200}) == []
    lines = protocol_differences(paper, {"dataset": "digits", "epochs": 200, "encoder": "small"})
    assert lines == ["dataset: digits (paper: CIFAR-10)", "encoder: small (paper: not stated)"]


@pytest.mark.parametrize("claim", published.claims(), ids=lambda c: c.id)
def test_claims_on_the_printed_numbers_give_the_stated_counts(claim):
    """The data files state the outcome of every test on the printed numbers."""
    for test in claim.tests:
        outcome = judge_claim(Claim(claim.id, "", "", "", "", (test,)), published.tables())
        stated = test["published"]
        assert outcome.missing == 0  # a printed dash, as in rows of cacr-c31, is no comparison
        if "hold" in stated:
            assert (sum(item.holds for item in outcome.items), len(outcome.items)) == (stated["hold"], stated["of"])
        for name in ("difference", "ratio"):
            if name in stated:
                found = {i.comparison.label: i.comparison.value for i in outcome.items}
                assert found == pytest.approx(stated[name], abs=1e-4)
        if "steps" in stated:
            assert [i.comparison.value for i in outcome.items] == pytest.approx(stated["steps"])
        if "spread" in stated:
            assert outcome.items[0].comparison.value == pytest.approx(stated["spread"])


def test_what_a_printed_number_is_judged_by():
    """Both spreads give Welch, one run borrows the printed one, and the same value for every seed is no spread."""
    printed, bare, score = PrintedCell(842.0, 27.0), PrintedCell(842.0), "score at 100K steps"
    assert verdicts.compare_printed(printed, 3, summarize([820.0, 860.0, 835.0]), score, True).basis == "Welch"
    alone = verdicts.compare_printed(bare, None, summarize([820.0, 860.0, 835.0]), score, True)
    assert alone.low < alone.difference < alone.high
    single = verdicts.compare_printed(printed, 3, summarize([500.0]), score, True)
    assert single.verdict == DIFFERS
    assert single.low < single.difference < single.high < 0
    for found in (
        verdicts.compare_printed(bare, None, summarize([842.0]), score, True),
        *(
            verdicts.compare_printed(PrintedCell(75.0), None, summarize([level] * 3), "accuracy %", True)
            for level in (75.4, 78.0)
        ),
    ):
        assert found.verdict == UNDECIDED
        assert isnan(found.low)
    assert (
        verdicts.compare_printed(PrintedCell(75.0, 0.5), 5, summarize([78.0] * 3), "accuracy %", True).verdict
        == DIFFERS
    )


def test_verdicts_beside_printed_numbers_are_one_family():
    cell = PrintedCell(80.0, 0.5)
    rows = [summarize([80.0 + shift, 81.0 + shift, 79.5 + shift, 80.4 + shift]) for shift in (3.0, 0.0, 0.0, 0.0, 0.0)]
    alone = [verdicts.compare_printed(cell, 5, ours, "accuracy (%)", True) for ours in rows]
    assert alone[0].verdict == DIFFERS
    parts = np.array([rows[0].std ** 2 / 4, 0.5**2 / 5])
    error, df = parts.sum() ** 0.5, parts.sum() ** 2 / (parts**2 / [3, 4]).sum()
    tails = [stats.t.sf((alone[0].difference + bound) / error, df) for bound in (-1, 1)]
    assert alone[0].p == pytest.approx(2 * sum(tails))
    assert verdicts.as_family(alone[:1]) == alone[:1]
    most = int(0.05 / alone[0].p)
    kept = verdicts.as_family([alone[0], *[alone[1]] * (most - 1), None])
    assert (kept[0].verdict, kept[-1]) == (DIFFERS, None)
    lost = verdicts.as_family([alone[0], *[alone[1]] * most])
    assert lost[0].verdict == UNDECIDED
    assert ", differs alone (p = " in lost[0].basis


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


@pytest.mark.parametrize(("suite", "override", "cause"), [
    ("cacr-table7", "vision.encoder.tap=fc7", "vision.encoder.tap: ResNetEncoder has no layer 'fc7'"),
    ("lmcl-table3", "vision.data.pretrain_split=nothing", "stl10 has no split 'nothing'"),
    ("lmcl-table3", "train.batch_size=200000", "train.batch_size: 200000 is more than the 105000 images of stl10"),
    ("lmcl-table2", "vision.negatives=2000000", "vision.negatives: 2000000 of a memory bank"),
    ("arora-table2-text", "train.batch_size=401", "train.batch_size 401 must be a multiple of 3"),
    ("lmcl-table5", "rl.image_size=8", "images of 8 pixels are too small for 4 convolutions"),
    ("lmcl-table5", "rl.image_size=101", "image_size must be between 1 and the rendered size 100"),
])  # fmt: skip
def test_a_plan_names_what_cannot_be_built_and_its_cell(suite, override, cause, capsys, tmp_path):
    command = ["bench", suite, "--scale", "paper", "--plan", "--seeds", "1", "--runs", str(tmp_path)]
    assert main([*command, "--set", override]) == 1
    lines = capsys.readouterr().out.splitlines()
    line = next(line for line in lines if cause in line)
    sized = read_suite(suite).at("paper")
    assert f"{f'recipe {sized.scale.recipe}, ' * (suite != 'arora-table2-text')}seeds 0" in lines
    row, column = next((row, column) for row, column, _ in sized.cells())
    if suite != "lmcl-table2":  # its first row has a bank, the second none
        assert line.startswith(f"cannot run: row {row.label!r}, column {column.name!r}, seed 0")


def test_objectives_that_pairs_do_not_carry_and_deviations_are_named():
    sized = read_suite("lmcl-table3").at("paper", ["vision.views=2"], seeds=1)
    config = load_recipe("stl10-simclr", ["objective=cacr(k=4)"]).config
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
            (row.label, column.name, leaves(sized.configured(row, column, seed)))
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
        if sized.suite.name in ("lmcl-table5", "cllr-table4"):  # options that no paper names are said
            assert any("rho" in key for key in sized.protocol)
        if sized.suite.name in ("cacr-table2", "lmcl-table4"):
            scale = sized.scale.model_copy(update={"protocol": {}})
            mine = sized.suite.model_copy(update={"name": "mine", "scale": {"paper": scale}})
            assert set(sized.unmet) <= set(mine.at("paper").protocol)
            # At another scale, the same settings are compared with the shipped suite and its protocol.
            small = sized.suite.model_copy(update={"name": "mine", "scale": {"small": scale}})
            assert set(sized.protocol) <= set(small.at("small").protocol)


@pytest.mark.parametrize(("wanted", "values", "lines"), [
    (0.1, [0.1, 0.1], 0), (0.1, [0.1, 0.2], 1), (1, [True], 1),
    ([155, 170], [[155.0, 170.0]], 0), ({"each": [1, 2]}, [1, 2, 1], 0),
    ({"each": [1, 2]}, [1], 1), ({"each": [1, 2]}, [1, 2, 3], 1),
    ({"per": "b", "factor": 0.5}, [2.0], 0), ({"per": "b", "factor": 0.25}, [2.0], 1),
    ({"absent": True}, [None], 0), ({"absent": True}, [3], 1),
])  # fmt: skip
def test_rules_of_settings(wanted, values, lines):
    assert len(list(differs("a", wanted, [{"a": value, "b": 4} for value in values]))) == lines


def test_the_page_of_the_papers_has_a_row_for_everything():
    text = (DOCS / "papers.md").read_text()
    assert "`linear/accuracy`, 12 seeds (small), 3 seeds (paper)" in text  # of `cacr-table12`
    for paper in published.PAPERS:
        names = [row.name for row in page.lines_of(paper)]
        assert len(set(names)) == len(names), paper
        printed = [table.paper_table for table in published.tables().values() if table.paper == paper]
        drawn = [id_.rpartition("figure")[2] for id_, (of, _) in published.figures().items() if of == paper]
        printed += [f"Figure {number}" for number in drawn]
        assert [label for label in printed if not any(name.startswith(label) for name in names)] == [], paper
    rows = ("Lemma 4.3", "Theorem 6.1", "Proposition 6.2", "Eq. 5", "Theorem 4 ", "Property 1", "Lemma 3 ", "Table 18")
    assert [name for name in rows if f"| {name}" not in text] == []


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


WHY = "digits are at the ceiling"


def shipped(name):
    found = gather([SHIPPED / f"{name}-small.jsonl"])
    return SuiteResults(found.manifests[0], found.records)


@pytest.mark.parametrize("name", ["lmcl-table5", "cllr-table4", "cacr-table3", "cacr-table14"])
def test_committed_results_follow_the_mark_of_their_suite(name):
    assert "not_decidable" not in (SHIPPED / f"{name}-small.jsonl").open().readline()
    results, said = shipped(name), read_suite(name).scale["small"].not_decidable
    assert said
    claims = [each for each in results.claims() if each.verdict != NO_TEST]
    assert claims
    assert {(each.verdict, why(each)) for each in claims} == {(NOT_DECIDABLE, said)}
    assert all(isnan(each.p_holm) for each in claims)
    assert findings.of_suite(results)[-1].startswith(f"Not decidable on this hardware: {said[:-1]}")
    # The numbers are still there.
    assert all(cell.summary for cell in results.cells)
    assert any(cell.against_base and isfinite(cell.against_base.p_t) for cell in results.cells)


CIFAR = ["CIFAR-10", "CIFAR-100", "STL-10"]
LEVEL = {"CACR": 86.0, "w/o pi+": 85.0, "w/o pi-": 80.0, "UAUR": 75.0}


def table9(runs_folder, reason=""):
    """CACR Table 9 as the paper has it, with little noise: each claim is true, each difference significant."""
    rows = [(name, "infonce", None if name == "CACR" else "CACR") for name in LEVEL]
    more = {"published": "cacr-table9", "kind": "study", "not_decidable": reason, "show": []}
    more["values"] = lambda r, c, s: (LEVEL[r] + 0.01 * ((7 * s + 3 * len(r) + len(c)) % 5)) / 100
    return runs_folder.results("cacr-table9", rows, CIFAR, seeds=range(5), **more)


def test_a_suite_of_ones_own_is_counted_nowhere(runs_folder, tmp_path):
    counted, unfit = table9(runs_folder), table9(runs_folder, WHY)
    assert len(findings.decided(counted)) == len(counted.tested) == 9
    assert findings.decided(unfit) == unfit.tested == []
    assert {each.verdict for each in counted.claims()} != {NOT_DECIDABLE} == {each.verdict for each in unfit.claims()}
    assert all(isnan(cell.p_holm) for cell in unfit.cells)
    assert {rank.better + rank.worse for rank in ranks(unfit)} == {0}
    claims = {counted.manifest.name: counted.claims()}
    with_both = findings.in_a_sentence([counted, unfit], claims)
    alone = findings.in_a_sentence([counted], claims)
    assert with_both.startswith(alone[:-1])
    assert alone.startswith("1 suite: 9 of 9 comparisons")
    assert "room" not in alone
    assert with_both.endswith("1 further suite is not decidable on this hardware and not counted.")
    assert len(findings.decided_table([unfit, unfit], claims).rows) == 0
    row = findings.suites_table([unfit], claims).rows[0]
    assert WHY in " ".join(cell.text for cell in row)
    assert not any(isinstance(cell.sort, int) for cell in row)
    coverage = next(r for r in tables.coverage_table([unfit]).rows if NOT_DECIDABLE in r[3].text)
    assert [cell.sort for cell in coverage[4:]] == [0] * 5
    # The reason is in every format.
    write_report(runs_folder.path, tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "cacr-table9-small-claims.json").read_text())
    assert {(row["verdict on ours"], row["verdict on ours: note"]) for row in rows} == {(NOT_DECIDABLE, WHY)}
    for name in ("report.html", "report.md"):
        assert f"Not decidable on this hardware: {WHY}." in (tmp_path / "out" / name).read_text()
    assert not (tmp_path / "out" / "cacr-table9-small-ranking.csv").exists()
    # The printed numbers of a paper's protocol are not decided either.
    assert {cell.comparison.verdict for cell in counted.cells} != {NOT_DECIDABLE}
    assert {cell.comparison.verdict for cell in unfit.cells} == {NOT_DECIDABLE}


def test_a_claim_about_two_tables_rests_on_no_suite_that_lacks_results_or_is_marked():
    """arora-c06 is about two tables: without one of them its comparisons have no data."""
    marked, other = shipped("arora-table2-cifar100"), shipped("arora-table2-text")
    asked = SuiteResults(marked.manifest.model_copy(update={"not_decidable": ""}), marked.records)

    def told(results, *others):
        return next(each for each in results.claims(others) if each.claim.id == "arora-c06")

    both, alone = told(asked, asked, other), told(asked)
    assert (both.missing, both.items) == (0, told(asked, other).items)
    assert len(alone.items) < len(both.items)
    unfit = SuiteResults(other.manifest.model_copy(update={"not_decidable": WHY}), other.records)
    for lacking in (unfit, SuiteResults(other.manifest, {})):
        assert told(asked, lacking).items == alone.items
        assert told(asked, lacking).missing > 0
    assert (told(unfit, asked).verdict, why(told(unfit, asked))) == (NOT_DECIDABLE, WHY)


@pytest.mark.parametrize("name", ["six-tasks", "cacr-table15", "lmcl-table5"])
def test_the_mark_changes_no_run_and_other_settings_have_none(name):
    suite = read_suite(name)
    small = suite.scale["small"]
    plain = suite.model_copy(update={"scale": {"small": small.model_copy(update={"not_decidable": ""})}})
    jobs = suite.at("small").jobs()
    assert [job.hash for job in jobs] == [job.hash for job in plain.at("small").jobs()]
    assert suite.at("small").manifest(jobs).not_decidable == small.not_decidable
    for key in ("train.batch_size=64", "train.learning_rate=1e-3"):
        assert suite.at("small", (key,)).manifest([]).not_decidable == ""
    assert suite.at("small", ("device=cpu",)).manifest([]).not_decidable == small.not_decidable
    if "paper" in suite.scale:
        assert suite.at("paper").not_decidable == ""


def test_results_with_and_without_the_mark_are_merged(tmp_path):
    old = read_results_file(SHIPPED / "six-tasks-small.jsonl")
    new = replace(old, manifest=old.manifest.model_copy(update={"not_decidable": WHY}))
    assert merged(old, new)[1:] == merged(new, old)[1:] == ([], [])
    for suite in (old, new):
        write_results_file(tmp_path / "a.jsonl", suite)
        assert read_results_file(tmp_path / "a.jsonl") == suite
