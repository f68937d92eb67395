"""Suites that cannot decide anything at a scale: shown with the reason, counted nowhere."""

import json
from dataclasses import replace
from math import isfinite, isnan

import pytest

from dipole.benchmarks.claims.explain import why
from dipole.benchmarks.claims.verdicts import NO_TEST, NOT_DECIDABLE
from dipole.benchmarks.report import findings, overview, tables
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.write import write_report
from dipole.benchmarks.results_file import SHIPPED, merged, read_results_file, write_results_file
from dipole.benchmarks.suite import read_suite
from dipole.benchmarks.suite_results import SuiteResults, gather

WHY = "digits are at the ceiling"


def shipped(name):
    found = gather([SHIPPED / f"{name}-small.jsonl"])
    return SuiteResults(found.manifests[0], found.collection.records)


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

    def value(row, column, seed):
        return (LEVEL[row] + 0.01 * ((7 * seed + 3 * len(row) + len(column)) % 5)) / 100

    rows = [(name, "infonce", None if name == "CACR" else "CACR") for name in LEVEL]
    more = {"published": "cacr-table9", "kind": "study", "not_decidable": reason}
    return runs_folder.results("cacr-table9", rows, CIFAR, value, range(5), **more)


def test_a_suite_of_ones_own_is_counted_nowhere(runs_folder, tmp_path):
    counted, unfit = table9(runs_folder), table9(runs_folder, WHY)
    assert len(findings.decided(counted)) == len(findings.tested(counted)) == 9
    assert findings.decided(unfit) == findings.tested(unfit) == []
    assert {each.verdict for each in counted.claims()} != {NOT_DECIDABLE} == {each.verdict for each in unfit.claims()}
    assert all(isnan(cell.p_holm) for cell in unfit.cells)
    assert {rank.better + rank.worse for rank in ranks(unfit)} == {0}
    with_both = overview.in_a_sentence([counted, unfit])
    alone = overview.in_a_sentence([counted])
    assert with_both.startswith(alone[:-1])
    assert alone.startswith("1 suite: 9 of 9 comparisons")
    assert "room" not in alone
    assert with_both.endswith("1 further suite is not decidable on this hardware and not counted.")
    assert len(overview.decided_table([unfit, unfit]).rows) == 0
    row = overview.suites_table([unfit]).rows[0]
    assert WHY in " ".join(cell.text for cell in row)
    assert not any(isinstance(cell.sort, int) for cell in row)
    coverage = next(r for r in tables.coverage_table([unfit]).rows if NOT_DECIDABLE in r[3].text)
    assert [cell.sort for cell in coverage[4:]] == [0] * 5
    # The printed numbers of a paper's protocol are not decided either.
    assert {cell.comparison.verdict for cell in counted.cells} != {NOT_DECIDABLE}
    assert {cell.comparison.verdict for cell in unfit.cells} == {NOT_DECIDABLE}


def test_a_claim_of_another_suite_does_not_rest_on_it():
    """arora-c06 is about two tables: without one of them its comparisons have no data."""
    marked, other = shipped("arora-table2-cifar100"), shipped("arora-table2-text")
    asked = SuiteResults(marked.manifest.model_copy(update={"not_decidable": ""}), marked.records)

    def told(results, *others):
        return next(each for each in results.claims(others) if each.claim.id == "arora-c06")

    assert told(asked, other).missing == 0
    unfit = SuiteResults(other.manifest.model_copy(update={"not_decidable": WHY}), other.records)
    assert told(asked, unfit).items == told(asked).items
    assert told(asked, unfit).missing > 0
    assert (told(unfit, asked).verdict, why(told(unfit, asked))) == (NOT_DECIDABLE, WHY)


def test_the_reason_is_in_every_format(runs_folder, tmp_path):
    table9(runs_folder, WHY)
    write_report(runs_folder.path, tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "cacr-table9-small-claims.json").read_text())
    assert {(row["verdict on ours"], row["verdict on ours: note"]) for row in rows} == {(NOT_DECIDABLE, WHY)}
    for name in ("report.html", "report.md"):
        assert f"Not decidable on this hardware: {WHY}." in (tmp_path / "out" / name).read_text()
    assert not (tmp_path / "out" / "cacr-table9-small-ranking.csv").exists()


@pytest.mark.parametrize("name", ["six-tasks", "cacr-table15", "lmcl-table5"])
def test_the_mark_changes_no_run_and_other_settings_have_none(name):
    suite = read_suite(name)
    small = suite.scale["small"]
    scales = {"small": small.model_copy(update={"not_decidable": ""})}
    plain = suite.model_copy(update={"scale": scales})
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
