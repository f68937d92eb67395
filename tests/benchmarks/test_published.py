"""Printed tables, verdicts and claims: against the counts the data files state, and by hand-made grids."""

from dataclasses import dataclass, field
from math import isnan

import pytest
from scipy import stats

from dipole.benchmarks.claims import judge as claims_module
from dipole.benchmarks.claims.judge import judge_claim
from dipole.benchmarks.claims.printed import among, compare, margin, protocol_differences
from dipole.benchmarks.claims.published import Claim, PrintedCell, claims, figures, table, tables
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_COMPARED, UNDECIDED
from dipole.benchmarks.statistics import summarize
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
    assert judge_claim(CLAIM, {}).verdict == claims_module.NO_DATA
    assert judge_claim(Claim("y", "p", "s", "w", "text"), {}).verdict == claims_module.NO_TEST
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
        # Printed dashes are no comparisons; only one claim touches rows that have them.
        assert outcome.missing == (11 if claim.id == "cacr-c31" else 0)
        if "hold" in stated:
            assert (outcome.hold, len(outcome.items)) == (stated["hold"], stated["of"])
        for name in ("difference", "ratio"):
            if name in stated:
                assert {i.label: i.value for i in outcome.items} == pytest.approx(stated[name], abs=1e-4)
        if "steps" in stated:
            assert [i.value for i in outcome.items] == pytest.approx(stated["steps"])
        if "spread" in stated:
            assert outcome.items[0].value == pytest.approx(stated["spread"])


@dataclass
class Ours:
    """A grid made by hand: values by seed for (row, column)."""

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
