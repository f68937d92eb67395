"""Every claim of the papers agrees, differs and is undecided on data made up for it. Bounds, counts and few seeds."""

import csv
import json
from itertools import product

import numpy as np
import pytest
from scipy import stats

from dipole.benchmarks.claims import published, verdicts
from dipole.benchmarks.claims.judge import deciding, judge_claim, reach, why
from dipole.benchmarks.claims.protocol import ClaimPart
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NO_ROOM, NOT_LEARNT, NOTHING, UNDECIDED, Evidence
from dipole.benchmarks.report.write import write_report
from dipole.benchmarks.run.bench import print_results
from dipole.benchmarks.statistics import Summary, summarize
from dipole.benchmarks.statistics.differences import Estimate, of_pairs, of_sample
from tests.benchmarks.claim_data import Grid, grids, read_claims

RAW = read_claims()
CLAIMS = {claim.id: claim for claim in published.claims()}
TESTABLE = [id_ for id_, claim in CLAIMS.items() if claim.tests]


def made(id_, want, seeds=8):
    return judge_claim(CLAIMS[id_], grids(*RAW[id_], want, seeds))


@pytest.mark.parametrize("id_", TESTABLE)
def test_every_claim_can_agree_differ_and_stay_open(id_):
    for want, verdict in (("agrees", AGREES), ("differs", DIFFERS), ("bound", UNDECIDED)):
        outcome = made(id_, want)
        assert outcome.verdict == verdict, (want, outcome.p, why(outcome))
        assert why(outcome)
        if want == "agrees":
            assert all(item.holds for item in outcome.items)
        if want == "bound":
            assert "on its bound, so no number of seeds decides it" in why(outcome)
    # One seed decides nothing and says so.
    one = {
        name: Grid(RAW[id_][2][name], {place: {0: each[0]} for place, each in grid.cells.items()})
        for name, grid in grids(*RAW[id_], "agrees").items()
    }
    outcome = judge_claim(CLAIMS[id_], one)
    assert outcome.verdict == UNDECIDED
    assert np.isnan(outcome.p)
    assert "10 seeds" in why(outcome)


def test_there_are_55_and_each_has_kinds_whose_every_part_names_its_parameters():
    assert len(TESTABLE) == 55
    for id_ in TESTABLE:
        claim = CLAIMS[id_]
        assert claim.parts, id_
        for part in claim.parts:
            for i in part.tests or range(len(claim.tests)):
                least = claim.tests[i].get("min_diff")
                assert least is None or least == part.bound, id_
                assert (claim.tests[i]["kind"] == "ratio") == (part.kind == "ratio"), id_
    judged = {id_: {i for part in CLAIMS[id_].parts for i in part.tests or range(len(CLAIMS[id_].tests))}
              for id_ in TESTABLE}  # fmt: skip
    not_judged = {id_ for id_ in TESTABLE if judged[id_] != set(range(len(CLAIMS[id_].tests)))}
    assert not_judged == {"cacr-c23", "cllr-c03"}
    assert all(claim.not_tested for claim in CLAIMS.values() if not claim.tests)
    assert not any(claim.not_tested for claim in CLAIMS.values() if claim.tests)


@pytest.mark.parametrize(("given", "said"), [
    ({"kind": "within"}, "needs margin"), ({"kind": "closeness"}, "unknown kind 'closeness'"),
    ({"kind": "all", "margin": 1.0}, "no parameter margin"),
    ({"kind": "between", "low": 2.0, "high": 1.0}, "must be below"),
    ({"kind": "ratio", "low": 0.0, "high": 1.0}, "above 0"),
    ({"kind": "within", "margin": -1.0}, "must be above 0"),
    ({"kind": "about", "amount": 1.0, "low": 0.0, "high": 2.0, "margin": 1.0}, "either an amount"),
])  # fmt: skip
def test_a_part_without_its_parameters_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ClaimPart(**given)


def with_gaps(id_, gaps, seeds=6, noise=0.05, level=60.0, untrained=None):
    """A claim's tables: row a of its first test is off by these gaps, others have one level, `untrained` before."""
    claim, _, tables = RAW[id_]
    test = claim["tests"][0]
    first = test["a"] if isinstance(test["a"], str) else f"{test['a']['method']} / {test['a']['group']}"
    generator = np.random.default_rng(3)
    found = {}
    for name in sorted({t[key] for t in claim["tests"] for key in ("table", "table_b") if key in t}):
        table, cells = tables[name], {}
        for row, column in product([row.label for row in Grid(table, {}).rows], table["columns"]):
            gap = gaps.get(column, 0.0) if (name, row) == (test["table"], first) else 0.0
            cells[row, column, "mean"] = level + gap + noise * generator.normal(size=seeds)
            if untrained is not None:
                cells[row, column, "untrained"] = untrained + noise * generator.normal(size=seeds)
        values = {place: dict(enumerate(map(float, each))) for place, each in cells.items()}
        found[name] = Grid(table, values)
    return found


CIFAR = ("CIFAR-10", "CIFAR-100", "STL-10")
ARORA = ("avg-2", "avg-5", "top-5", "top-1")


@pytest.mark.parametrize(("id_", "gaps", "given", "verdict"), [
    ("arora-c04", dict.fromkeys(ARORA, 40.0), {}, DIFFERS),  # within two
    ("arora-c04", dict.fromkeys(ARORA, 0.4), {}, AGREES),
    ("cacr-c32", dict.fromkeys(CIFAR, 30.0), {}, DIFFERS),  # comparable
    ("cacr-c32", dict.fromkeys(CIFAR, -30.0), {}, DIFFERS),
    ("cacr-c28", {"ImageNet-100": 0.47, "ImageNet-1K": 0.47}, {}, DIFFERS),  # at least 1.74 and 0.6
    ("cacr-c28", {"ImageNet-100": 2.5, "ImageNet-1K": 1.5}, {}, AGREES),
    ("cacr-c16", dict.fromkeys(CIFAR, 4.98), {"noise": 0.002}, DIFFERS),  # more than 5
    ("cacr-c16", dict.fromkeys(CIFAR, 4.98), {"noise": 0.5}, UNDECIDED),
    ("cacr-c16", dict.fromkeys(CIFAR, 6.0), {}, AGREES),
    # A printed effect beyond the bound of the metric has no room.
    ("cacr-c28", {"ImageNet-100": 0.4, "ImageNet-1K": 0.4}, {"level": 99.0}, NO_ROOM),  # prints 1.86 and 0.9
    ("cacr-c28", dict.fromkeys(("ImageNet-100", "ImageNet-1K"), -4.0), {"level": 99.5}, NO_ROOM),  # nor for a loss
    ("cacr-c28", {"ImageNet-100": 0.4, "ImageNet-1K": 0.4}, {"level": 96.0}, DIFFERS),
    ("arora-c04", dict.fromkeys(ARORA, 0.1), {"level": 99.5}, NO_ROOM),  # within two, at the ceiling anything is
    ("arora-c04", dict.fromkeys(ARORA, 0.1), {"level": 95.0}, AGREES),
    ("cacr-c32", dict.fromkeys(CIFAR, 0.1), {"level": 99.5}, NO_ROOM),
    ("lmcl-c10", {}, {"level": 999.0}, NO_ROOM),  # scores end at 1000
    ("lmcl-c04", {"CR": -0.3}, {"level": 99.6}, NO_ROOM),  # five of six have to gain, and only CR has room
    ("lmcl-c04", {"CR": -0.3}, {"level": 60.0}, UNDECIDED), ("lmcl-c10", {}, {"level": 900.0}, UNDECIDED),
])  # fmt: skip
def test_gaps_are_compared_with_the_bound(id_, gaps, given, verdict):
    outcome = judge_claim(CLAIMS[id_], with_gaps(id_, gaps, **given))
    assert outcome.verdict == verdict
    assert ("does not fit between our base and the bound" in why(outcome)) == (verdict == NO_ROOM)


@pytest.mark.parametrize("id_", ["cacr-c28", "cacr-c16"])
@pytest.mark.parametrize(("untrained", "is_learnt"), [(60.0, False), (63.0, False), (40.0, True)])
def test_a_base_at_the_untrained_level_is_not_learnt(id_, untrained, is_learnt):
    gaps = dict.fromkeys((*CIFAR, "ImageNet-100", "ImageNet-1K"), 8.0)
    columns = with_gaps(id_, {})[CLAIMS[id_].tests[0]["table"]].columns
    gaps = {column: gap for column, gap in gaps.items() if column in columns}
    verdict = judge_claim(CLAIMS[id_], with_gaps(id_, gaps, untrained=untrained)).verdict
    assert verdict == (AGREES if is_learnt else NOT_LEARNT)


def test_ratios_and_bounds_are_not_claims():
    assert times({"CACR (K=4)": 299, "CACR (K=10)": 299}).verdict == DIFFERS
    mild = times({"CACR (K=4)": 1.67, "CACR (K=10)": 3.05})
    assert mild.verdict == AGREES
    low, high = mild.items[0].estimate.interval()
    assert np.exp(low) < 1.67 < np.exp(high)
    outcome = judge_claim(CLAIMS["lmcl-c09"], published.tables())
    (item,) = outcome.items
    assert item.comparison.value == pytest.approx(1.5)
    assert not item.holds
    assert outcome.verdict == UNDECIDED


def _judge(id_, table, cells):
    values = {place: dict(enumerate(map(float, each))) for place, each in cells.items()}
    return judge_claim(CLAIMS[id_], {table["id"]: Grid(table, values)})


def times(factors):
    table = RAW["cacr-c22"][2]["cacr-table11"]
    noise = np.random.default_rng(1).normal(size=(len(table["rows"]), 5))
    rows = [row["method"] for row in table["rows"]]
    cells = {(row, "seconds", "mean"): 0.04 * factors.get(row, 1) * np.exp(0.02 * e)
             for row, e in zip(rows, noise, strict=True)}  # fmt: skip
    return _judge("cacr-c22", table, cells)


def test_significant_is_asked_of_every_set_named():
    rows = RAW["lmcl-c01"][2]["lmcl-table1"]
    generator = np.random.default_rng(0)
    level = {"Euclidean Space": 60, "Conventional CT": 70, "LMCT (Ours)": 80}
    places = product(level, ("Three-Bars", "Nested-Moons"), ("mean",))
    cells = {place: level[place[0]] + generator.normal(size=20) for place in places}
    assert _judge("lmcl-c01", rows, cells).verdict == AGREES
    base = cells["Conventional CT", "Nested-Moons", "mean"]
    noise = generator.normal(size=20)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    t = stats.t.isf(0.34, 19)  # p = 0.68 on one of the two sets
    cells["LMCT (Ours)", "Nested-Moons", "mean"] = base + noise + t / np.sqrt(20)
    outcome = _judge("lmcl-c01", rows, cells)
    found = {item.comparison.label: item.evidence.p for item in outcome.parts[0].items}
    assert found["Nested-Moons"] == pytest.approx(0.68)
    assert found["Three-Bars"] < 1e-6
    assert outcome.verdict == UNDECIDED


@pytest.mark.parametrize("id_", ["lmcl-c05", "cllr-c06"])
@pytest.mark.parametrize(("gaining", "verdict"), [(6, AGREES), (5, AGREES), (4, AGREES), (3, DIFFERS), (1, DIFFERS)])
def test_most_is_more_than_half_of_the_tasks(id_, gaining, verdict):
    claim, _, tables = RAW[id_]
    table = tables[claim["tests"][0]["table"]]
    generator = np.random.default_rng(5)
    cells = {}
    for row in (row["method"] for row in table["rows"]):
        for i, column in enumerate(table["columns"]):
            gain = 3.0 if row != "QT" and i < gaining else 0.0
            cells[row, column, "mean"] = 80 + gain + 0.1 * generator.normal(size=5)
    assert _judge(id_, table, cells).verdict == verdict


def test_all_but_one_may_be_any_one():
    table = RAW["lmcl-c04"][2]["lmcl-table4"]
    generator = np.random.default_rng(6)
    for losing in ((), ("CR",), ("TREC",), ("CR", "TREC")):
        cells = {
            (row, column, "mean"): 80 + (-2 if column in losing else 2) * (row == "LMCL(HCL+DP)")
            + 0.1 * generator.normal(size=5)
            for row, column in product(("HCL", "LMCL(HCL+DP)"), table["columns"])
        }  # fmt: skip
        outcome = _judge("lmcl-c04", table, cells)
        assert outcome.verdict == (AGREES if len(losing) < 2 else DIFFERS)
        assert deciding(outcome).holds == (outcome.verdict == AGREES)  # not the one that may fail


def test_a_claim_is_never_shown_by_part_of_its_comparisons_but_may_be_refuted_by_one():
    for gap, verdict in ((6.0, UNDECIDED), (2.0, DIFFERS)):
        cells = with_gaps("cacr-c16", dict.fromkeys(CIFAR, gap))["cacr-table9"].cells
        less = {place: each for place, each in cells.items() if place[1] != "STL-10"}
        outcome = judge_claim(CLAIMS["cacr-c16"], {"cacr-table9": Grid(RAW["cacr-c16"][2]["cacr-table9"], less)})
        assert (outcome.verdict, outcome.missing) == (verdict, 1)
    # More seeds of the others would not help.
    above = {place: {s: v + 9 for s, v in each.items()} for place, each in less.items() if place[0] == "CACR"}
    cells = Grid(RAW["cacr-c16"][2]["cacr-table9"], {**less, **above})
    assert why(judge_claim(CLAIMS["cacr-c16"], {"cacr-table9": cells})).endswith("1 comparison without data")


def test_printed_spreads_are_tested_by_welch_from_what_is_printed():
    """LMCL Table 1 prints deviations over 20 trials, most tables none."""
    claim, table = CLAIMS["lmcl-c01"], published.table("lmcl-table1")
    for item in judge_claim(claim, published.tables()).parts[0].items:
        ours, base = (table.find(row).cells[item.comparison.label] for row in ("LMCT (Ours)", "Conventional CT"))
        expected = stats.ttest_ind_from_stats(ours.mean, ours.std, 20, base.mean, base.std, 20, equal_var=False)
        assert item.evidence.p == pytest.approx(expected.pvalue)
    printed = judge_claim(CLAIMS["lmcl-c02"], published.tables())
    assert not printed.is_tested
    assert printed.verdict == UNDECIDED
    # Three trials with these spreads: no F-test of three against three tells 44 from 142.
    spreads = judge_claim(CLAIMS["lmcl-c12"], published.tables())
    assert spreads.is_tested
    assert spreads.verdict == UNDECIDED


def test_equivalence_is_two_one_sided_tests_and_a_constant_gap_is_judged_by_the_sides():
    one = dict(enumerate([70.1, 70.9, 69.8, 70.4, 70.2]))
    other = dict(enumerate([70.0, 70.2, 70.1, 69.9, 70.6]))
    found = verdicts.against(of_pairs(one, other), -1.0, 1.0)
    gaps = np.array(list(one.values())) - np.array(list(other.values()))
    greater = stats.ttest_1samp(gaps, -1.0, alternative="greater").pvalue
    less = stats.ttest_1samp(gaps, 1.0, alternative="less").pvalue
    assert found.inside == pytest.approx(max(greater, less))
    low, high = of_pairs(one, other).interval()
    assert (found.p < 0.05) == (low > -1 and high < 1)
    assert (low, high) == pytest.approx(stats.ttest_1samp(gaps, 0).confidence_interval(0.95))
    one, other = [90.0, 91.0, 92.0], [50.0, 51.0, 52.0]
    found = of_pairs(dict(enumerate(one)), dict(enumerate(other)))
    expected = stats.ttest_ind(one, other, equal_var=False)
    assert verdicts.against(found, 0, np.inf).p == pytest.approx(expected.pvalue)
    flat = of_pairs(dict.fromkeys(range(3), 90.0), dict.fromkeys(range(3), 50.0))
    assert verdicts.against(flat, 0, np.inf) == NOTHING


def test_spreads_are_compared_by_f():
    one, other = summarize([1.0, 2.0, 4.0, 3.5]), summarize([10.0, 40.0, 25.0])
    found = verdicts.smaller_spread(one, other)
    assert found.inside == pytest.approx(stats.f.cdf(one.std**2 / other.std**2, 3, 2))
    assert found.inside + found.outside == pytest.approx(1)
    assert verdicts.smaller_spread(one, one) == Evidence(pytest.approx(0.5), pytest.approx(0.5))
    assert verdicts.smaller_spread(Summary(3, 1, 0, 0, 0), Summary(3, 2, 0, 0, 0)) == NOTHING


@pytest.mark.parametrize("df", [1, 4, 19])
def test_the_distance_that_is_named_is_shown_in_80_percent(df):
    distance = reach(Estimate(0.0, 2.0, df, 1.0))
    generator = np.random.default_rng(0)
    values = distance + 2.0 * generator.normal(size=40_000)
    errors = 2.0 * np.sqrt(generator.chisquare(df, size=40_000) / df)
    assert np.mean(np.abs(values / errors) > stats.t.ppf(0.975, df)) == pytest.approx(0.8, abs=0.01)
    assert np.isnan(reach(Estimate(1.0)))


def test_false_alarms_stay_below_their_level():
    """On a bound, and of "most" where three of six tasks gain for certain and three not at all."""
    generator = np.random.default_rng(2)
    wrong, decided = 0, 0
    for _ in range(400):
        gaps = [(5.0 if i < 3 else 0.0) + generator.normal(size=5) for i in range(6)]
        found = verdicts.at_least([verdicts.against(of_sample(each.tolist()), 0, np.inf) for each in gaps], 4)
        wrong += found.is_for and found.p < 0.05
    for effect in [0.0, 1.0] * 500:
        gaps = effect + generator.normal(size=4)
        decided += verdicts.against(of_sample(gaps.tolist()), effect, np.inf).p < 0.05
    assert wrong / 400 < 0.04
    assert decided / 1000 < 0.07


def test_the_claims_of_a_suite_are_one_family(runs_folder):
    """Each claim of CACR Table 9 is shown alone at 0.03. Of three together none is."""
    unit = np.random.default_rng(0).normal(size=3)
    unit = (unit - unit.mean()) / unit.std(ddof=1)
    shift = stats.t.isf(0.015, 2) / np.sqrt(3)  # a paired p of 0.03 against the bound
    level = {"CACR": 0.0, "w/o pi+": -(shift), "w/o pi-": -(5 + shift), "UAUR": -(5 + 3 * shift)}
    wave = {"CACR": 1.0, "w/o pi+": 0.0, "w/o pi-": 0.0, "UAUR": -1.0}
    rows = [(name, "infonce", None) for name in level]
    results = runs_folder.results(
        "cacr-table9", rows, CIFAR, lambda r, c, s: (80 + level[r] + wave[r] * unit[s]) / 100, published="cacr-table9"
    )
    found = {each.claim.id: each for each in results.claims()}
    assert found["cacr-c16"].p == pytest.approx(0.03)
    assert found["cacr-c16"].p_holm > 0.05
    assert found["cacr-c16"].verdict == UNDECIDED
    assert "Significant alone (p = 0.030), but not among all claims" in why(found["cacr-c16"])


def test_kind_bound_estimate_p_and_verdict_stand_in_every_format(runs_folder, tmp_path, monkeypatch, capsys):
    """CACR Table 9 with c16 refuted: w/o pi- is 4.98 below, and all else as claimed."""
    generator = np.random.default_rng(0)
    level = {"CACR": 86.0, "w/o pi+": 85.0, "w/o pi-": 81.02, "UAUR": 79.0}
    noise = {place: 0.002 * generator.normal(size=4) for place in product(level, CIFAR)}
    rows = [(name, "infonce", None) for name in level]
    more = {"published": "cacr-table9", "show": []}
    more["values"] = lambda r, c, s: (level[r] + noise[r, c][s]) / 100
    results = runs_folder.results("cacr-table9", rows, CIFAR, seeds=range(4), **more)
    write_report(runs_folder.path, tmp_path / "out")
    rows = {row["claim"]: row for row in json.loads((tmp_path / "out" / "cacr-table9-small-claims.json").read_text())}
    row = rows["cacr-c16"]
    assert row["kind"] == "more than 5, in each of 3"
    assert row["verdict on ours"] == DIFFERS
    assert row["p (Holm)"] < 0.05
    assert "4.98 (4.9" in row["estimate"]
    assert row["printed numbers"] == "3 of 3"
    assert row["printed numbers: note"] == "not tested, because no spread is printed"
    assert rows["cacr-c15"]["verdict on ours"] == rows["cacr-c17"]["verdict on ours"] == AGREES
    with (tmp_path / "out" / "cacr-table9-small-claims.csv").open() as lines:
        (line,) = [line for line in csv.DictReader(lines) if line["claim"] == "cacr-c16"]
    assert (line["kind"], line["verdict on ours"]) == (row["kind"], DIFFERS)
    every = {row["claim"]: row for row in json.loads((tmp_path / "out" / "every-claim.json").read_text())}
    assert every["cacr-c16"]["verdict on ours"] == "cacr-table9-small: differs"
    assert every["lmcl-c16"]["verdict on ours: note"] == "the paper gives no timings"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "more than 5, in each of 3" in page
    assert "2 shown to agree, 1 to differ, 0 undecided" in page
    monkeypatch.setenv("COLUMNS", "80")
    print_results(results)
    said = capsys.readouterr().out
    for part in ("cacr-c16", "more than 5"):
        assert part in " ".join(said.split())
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.0, AGREES), (0.5, AGREES), (1.0, UNDECIDED), (1.3, UNDECIDED), (4.0, DIFFERS)]
)
def test_a_printed_number_is_judged_by_its_margin_on_both_sides(shift, verdict):
    """Welch against 75 +- 0.2 of five trials: inside the point, across it, outside of it."""
    noise = np.random.default_rng(0).normal(size=6)
    ours = 75 + shift + 0.3 * (noise - noise.mean()) / noise.std(ddof=1)
    found = verdicts.compare_printed(published.PrintedCell(75.0, 0.2), 5, summarize(ours.tolist()), "accuracy %", True)
    parts = np.array([0.3**2 / 6, 0.2**2 / 5])
    df = parts.sum() ** 2 / (parts**2 / [5, 4]).sum()
    half = stats.t.ppf(0.975, df) * np.sqrt(parts.sum())
    assert (found.low, found.high) == pytest.approx((shift - half, shift + half))
    assert found.verdict == verdict
