"""Collection, results, ranking and the tables of a report, against numbers worked out separately."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dipole.benchmarks.claims import published
from dipole.benchmarks.manifest import is_done, read_records, write_manifest
from dipole.benchmarks.report import charts, findings, ranking, tables
from dipole.benchmarks.report.findings import empty_columns
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.table import to_csv
from dipole.benchmarks.report.write import make_report, write_report
from dipole.benchmarks.results_file import Curve, read_curves
from dipole.benchmarks.statistics import power
from dipole.benchmarks.suite_results import SuiteResults
from dipole.core.record import read_record
from dipole.core.utils.errors import ConfigError
from tests.benchmarks.conftest import damaged

RECORDS = Path(__file__).parent / "records"


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda p: p.stem)
def test_old_records_stay_readable(path, tmp_path):
    """These files follow schema version 1 and are never edited."""
    record = read_record(path)
    folder = tmp_path / "runs" / record.hash
    folder.mkdir(parents=True)
    shutil.copy(path, folder / "record.json")
    assert read_records(tmp_path / "runs").records == {record.hash: record}
    assert record.hash in to_csv(make_report(tmp_path / "runs").tables[0])


def test_only_a_whole_finished_record_counts(runs_folder):
    found = runs_folder.results("s", [("a", "infonce", None)], "A", lambda *_: 0.5, seeds=(0, 1))
    runs = [runs_folder.path / job.hash for job in found.jobs]
    for count, run in enumerate(runs):
        assert is_done(run)
        assert (found.cell("a", "A").summary.n, found.cell("a", "A").wanted) == (2 - count, 2)
        damaged(runs_folder, f"{run.name}/record.json", status="failed")
        assert not is_done(run)
        found = runs_folder.read(found.manifest)
    shown = tables.results_table(found).rows[0]
    assert (shown[-1].text, shown[-1].mark) == ("failed", "bad")
    assert findings.of_suite(found)[0] == "2 of 2 runs are missing, 2 of them failed."
    damaged(runs_folder, f"{runs[0].name}/record.json", status="done")
    assert is_done(runs[0])
    damaged(runs_folder, f"{runs[0].name}/record.json", (runs[0] / "record.json").read_text()[:-20])
    assert not is_done(runs[0])


def test_cells_hold_our_sample_and_missing_seeds_are_shown(runs_folder):
    values = {"base": [80.0, 81.0, 82.0], "other": [82.0, 82.5, 84.0]}
    rows = [("base", "infonce", None), ("other", "dcl", "base")]
    results = runs_folder.results(
        "hand", rows, "AB", lambda r, c, s: None if (r, c, s) == ("other", "B", 2) else values[r][s] / 100
    )
    cell = results.cell("other", "A")
    assert cell.summary.mean == pytest.approx(248.5 / 3)
    assert (cell.against_base.difference, cell.against_base.n) == (pytest.approx((2 + 1.5 + 2) / 3), 3)
    spread, alpha = np.std([2, 1.5, 2], ddof=1), 0.05 / 2  # two tests
    assert power(cell.detectable, spread, 3, alpha, is_paired=True) == pytest.approx(0.8)
    assert np.isnan(results.cell("base", "A").detectable)
    assert results.cell("base", "A").against_base is None
    assert results.cell("other", "B").against_base.n == 2
    of_other = [results.cell("other", column) for column in "AB"]
    plain = min(c.against_base.p_t for c in of_other)
    assert min(c.p_holm for c in of_other) == pytest.approx(2 * plain)
    sheet = tables.results_table(results)
    b = sheet.head.index("B (%)")
    other = next(row for row in sheet.rows if row[0].text == "other")
    assert (other[b].sub, sheet.rows[1][b - 1].mark) == ("n = 2", "best")
    assert sheet.rows[-1][0].text == "detectable difference"  # one row has a test in each column


def test_drops_are_measured_seed_by_seed_and_agents_aggregated_against_their_own_base(runs_folder):
    values = {"regular/CIFAR-10": [0.83, 0.85], "linear/CIFAR-10": [0.80, 0.79]}
    rows, named = [("CACR (K=4)", "cacr", None)], {"published": "cacr-table2"}
    found = runs_folder.results("cacr-table2", rows, values, lambda r, c, s: values[c][s], (0, 1), **named)
    cell = "CACR (K=4)", "linear/CIFAR-10", "drop"
    assert found.samples(*cell) == pytest.approx({0: 3.0, 1: 6.0})
    assert found.value(*cell) == pytest.approx(4.5)
    rows = [("CURL", "infonce", None), ("DCL", "dcl", "CURL"), ("LMCL(DCL+DP)", "dcl + 0.1*dp", "DCL")]
    level = {"CURL": 1.0, "DCL": 2.0, "LMCL(DCL+DP)": 1.5}
    columns, named = [("Spin", "rl"), ("Walk", "rl")], {"published": "lmcl-table5"}
    results = runs_folder.results("lmcl-table5", rows, columns, lambda r, c, s: level[r] + s / 100, **named)
    by = {row[0].text: row for row in tables.aggregate_table(results).rows}
    assert by["DCL"][2].sort == pytest.approx(201.0)
    assert (by["CURL"][4].text, by["DCL"][4].sort) == ("", 1.0)
    assert (by["LMCL(DCL+DP)"][3].text, by["LMCL(DCL+DP)"][4].sort) == ("DCL", 0.0)


def test_claims_and_verdicts_of_a_suite(runs_folder):
    rows = [(m, "infonce", None) for m in ("SimCLR (CL)", "AU-CL", "HN-CL", "CACR (K=1)", "CMC (K=4)", "CACR (K=4)")]
    level = {row[0]: 0.80 + 0.02 * i for i, row in enumerate(rows)}
    columns = ("CIFAR-10", "CIFAR-100", "STL-10")
    named = {"published": "cacr-table6"}
    found = runs_folder.results("cacr-table6", rows, columns, lambda r, c, s: level[r] * (1 + s / 1000), **named)
    claim = {c.claim.id: c for c in found.claims()}["cacr-c12"]
    assert (sum(item.holds for item in claim.items), len(claim.items), claim.full_verdict) == (12, 12, "agrees")
    # 80.1 +- 0.1 against the printed 83.47 of SimCLR on CIFAR-10.
    assert found.cell("SimCLR (CL)", "CIFAR-10").comparison.verdict == "differs"
    found = runs_folder.read(found.manifest.model_copy(update={"protocol": {"dataset": "digits"}}))
    assert found.cell("SimCLR (CL)", "CIFAR-10").comparison.verdict == "other protocol"
    assert {c.claim.id: c.full_verdict for c in found.claims()}["cacr-c12"] == "agrees (other protocol)"
    every = {row[0].text: row for row in tables.every_claim_table({found.manifest.name: found.claims()}).rows}
    assert every["cacr-c12"][-1].text == "cacr-table6-small: agrees (other protocol)"
    assert every["cacr-c12"][-2].text == "12 of 12"
    assert "dataset: digits (paper: CIFAR-10, CIFAR-100, STL-10)" in found.protocol_notes


def test_every_printed_table_is_listed_with_what_was_run_of_it(runs_folder):
    rows, values = [("SimCLR (CL)", "infonce", None)], {"CIFAR-10": 0.83, "STL-10": 0.5}
    runs_folder.results("cacr-table6", rows, values, lambda r, c, s: values[c] + s / 1000, published="cacr-table6")
    curl = {"rows": [("CURL", "infonce", None)], "columns": ["AVG-2"], "published": "arora-table2-cifar100"}
    assert runs_folder.results("own", values=lambda *_: 0.5, **curl).value("CURL", "AVG-2") == 50  # "CURL / CIFAR-100"
    report = make_report(runs_folder.path)
    (sheet,) = [sheet for sheet in report.tables if sheet.name == "published"]
    assert {row[0].text for row in sheet.rows} == set(published.tables())
    by = {row[0].text: dict(zip(sheet.head, (cell.text for cell in row), strict=True)) for row in sheet.rows}
    (every,) = [sheet for sheet in report.tables if sheet.name == "every-claim"]
    assert [row[0].text for row in every.rows] == [claim.id for claim in published.claims()]
    verdicts = {row[0].text: row[-1].text for row in every.rows}
    assert by["lmcl-table4"]["suite"] == verdicts["lmcl-c01"] == "no runs here"
    assert {verdicts[c.id] for c in published.claims() if not c.tests} == {"no test in numbers"}
    # 83.1 +- 0.1 against the printed 83.47, and 50.1 against 83.89.
    assert [by["cacr-table6"][name] for name in ("compared", "agree", "differ")] == ["2", "1", "1"]


def test_a_metric_that_no_run_has_is_said_with_the_nearest_one(runs_folder):
    results = runs_folder.results("s", [("a", "infonce", None)], "A", lambda *_: 0.5)
    assert empty_columns(results) == []
    columns = [results.manifest.columns[0].model_copy(update={"metric": "linear/acuracy"})]
    manifest = results.manifest.model_copy(update={"columns": columns})
    (line,) = empty_columns(runs_folder.read(manifest))
    assert "Did you mean 'linear/accuracy'?" in line
    assert "diag/rank" in line
    # Before anything is finished there is nothing to say.
    assert empty_columns(SuiteResults(manifest, {})) == []


def test_the_command_of_every_row_repeats_its_run(runs_folder):
    """A run of two processes through torchrun, and one outside of suites by the configuration in its folder."""
    manifest = runs_folder.suite("s", [("a", "infonce", None)], [("A", "vision")], lambda *_: 0.5, seeds=(0,))
    jobs = [manifest.jobs[0].model_copy(update={"processes": 2})]
    write_manifest(runs_folder.path, manifest.model_copy(update={"jobs": jobs}))
    other = runs_folder.record()
    commands = {
        sheet.name: sheet.rows[0][sheet.head.index("command")].text
        for sheet in make_report(runs_folder.path).tables
        if "command" in sheet.head
    }
    torchrun = "torchrun --standalone --nproc-per-node=2 -m dipole train recipe "
    assert commands["s-small-runs"] == f"{torchrun}--set objective=infonce --set seed=0"
    assert commands["other-runs"] == f"dipole train {runs_folder.path / other / 'config.toml'}"


def test_all_formats_hold_the_same_tables_and_charts(runs_folder, tmp_path):
    runs_folder.results("s", [("a", "infonce", None), ("b", "dcl", "a")], "A", lambda r, c, s: 0.5 + s / 100)
    report, out = write_report(runs_folder.path, tmp_path / "all"), tmp_path / "all"
    html, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
    for sheet in report.tables:
        rows = list(csv.reader(io.StringIO((out / f"{sheet.name}.csv").read_text())))
        assert len(rows) == len(sheet.rows) + 1
        assert f'data-name="{sheet.name}"' in html
        assert f"### {sheet.title}" in markdown
    assert "51.00" in html
    assert {path.stem for path in out.glob("*.tex")} == {sheet.name for sheet in report.tables}
    drawn = sum(len(pictures) for section in report.sections for pictures in section.pictures.values())
    assert drawn >= 3
    assert all(len(list((out / "charts").glob(f"*{kind}"))) == drawn for kind in (".svg", ".pdf", ".tex", ".vl.json"))
    (numbers,) = (out / "charts").glob("*all-rows.tex")
    assert r"a & 51.00 & 48.52 & 53.48 & 3 \\" in numbers.read_text()


@pytest.mark.parametrize("output", ["report.html", "."])
def test_an_empty_folder_gives_a_report_that_says_so_and_replaces_none(output, tmp_path):
    (tmp_path / "runs").mkdir()
    page = tmp_path / "report.html"
    write_report(tmp_path / "runs", page)
    assert "no runs yet" in page.read_text()
    page.write_text("of yesterday")
    with pytest.raises(ConfigError, match=r"there is no run to report, so .*report\.html was not replaced"):
        write_report(tmp_path / "runs", tmp_path / output)
    (tmp_path / "runs" / "odd.jsonl").write_text("[]")
    with pytest.raises(ConfigError, match=r"was not replaced: .*odd\.jsonl, line 1, is no line of a results file"):
        write_report(tmp_path / "runs", tmp_path / output)
    assert page.read_text() == "of yesterday"
    assert [path for path in tmp_path.iterdir() if path.is_file()] == [page]


def test_curves_skip_damage_and_long_ones_are_thinned_but_keep_their_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "x": 1.0}, {"step": 2, "x": None}, {"step": 3, "x": "y"}, {"step": 4, "x": 4.0}]
    deep = "[" * 200_000
    path.write_text("\n".join(map(json.dumps, lines)) + f'\n"x"{deep}\n{{"step": 1e999, "x": 1}}\n[1, "x"]\n{{"x": ')
    assert read_curves(path, ["x"]) == {"x": Curve((1.0, 4.0), (1.0, 4.0))}
    assert read_curves(tmp_path / "none", ["x"]) == {}
    path.write_text("".join(f'{{"step": {i}, "x": {i}}}\n' for i in range(1000)))
    curve = read_curves(path, ["x"])["x"]
    assert len(curve.steps) < 170
    assert (curve.steps[0], curve.steps[-1]) == (0, 999)


@pytest.mark.slow
def test_ten_thousand_records_in_seconds_and_a_gigabyte(runs_folder, tmp_path):
    objectives = [f"infonce(temperature={0.1 + i / 1000:.3f})" for i in range(500)]
    rows = [(o, o, None if i == 0 else objectives[0]) for i, o in enumerate(objectives)]
    columns = [(c, "vision") for c in "ABCDEFGHIJ"]
    runs_folder.suite("large", rows[:100], columns, lambda r, c, s: 0.5 + s / 10, range(5))
    for index in range(5000):
        runs_folder.record(objective=objectives[index % 500], seed=index)
    script = (
        "import sys, time; from pathlib import Path; from dipole.benchmarks.report.write import write_report;"
        "from dipole.core.utils.machine import peak_memory; write_report(Path(sys.argv[1]), Path(sys.argv[2]));"
        "print(peak_memory(), time.process_time())"
    )
    began = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", script, str(runs_folder.path), str(tmp_path / "report.html")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, processor = map(float, found.stdout.split())
    assert peak < 2**30
    # Processor time, because the machine may be shared. The wall clock is bounded loosely.
    assert processor < 20
    assert (tmp_path / "report.html").stat().st_size < 15e6
    assert time.monotonic() - began < 300


def test_a_study_says_which_gain_over_all_columns_holds_and_the_ranking_counts_what_the_cells_decide(runs_folder):
    noise = np.random.default_rng(7)
    rows = [("infonce", "infonce", None), ("better", "dcl", "infonce"), ("same", "hcl", "infonce")]
    columns = [f"column {i}" for i in range(5)]

    def values(row, column, seed):
        level = 0.8 + 0.03 * (row == "better")
        if column == columns[0]:  # the same and infonce are level up to single precision
            return level + 0.01 * seed + 1e-9 * (row == "same")
        return level + 0.01 * noise.normal()

    results = runs_folder.results("study", rows, columns, values, range(5), kind="study")
    said = " ".join(findings.of_suite(results))
    assert "Over all columns together, in units of the mean of infonce: better gains" in said
    assert "same gains" not in said
    assert "same loses" not in said
    decided = [c.row.label for c in results.cells if c.p_holm < 0.05]
    found = {rank.label: rank for rank in ranks(results)}
    assert all(rank.better + rank.worse == decided.count(label) for label, rank in found.items())
    # Five data sets: the critical difference has the ranks of the table, ties included.
    chart = ranking.rank_charts(results, [[column] for column in results.manifest.columns])[0].chart
    assert {row["label"]: row["x"] for row in chart.rows} == {name: rank.of_means for name, rank in found.items()}


def test_many_suites_open_with_a_line_each_and_the_claims_they_decide(runs_folder):
    for count in range(5):
        runs_folder.suite(
            f"s{count}", [("a", "infonce", None), ("b", "dcl", "a")], [("x", "vision")],
            lambda row, _, seed, gain=0.1 * count: 0.5 + gain * (row == "b") + 0.001 * seed * (1 + (row == "a")),
            show=["curves"] * (count == 3),
        )  # fmt: skip
    report = make_report(runs_folder.path)
    assert (report.summary, report.sections[0].id) == ("", "s0-small")
    shift = {"QT": 5}  # points
    runs_folder.table4(lambda r, c, s: (80 + shift.get(r, 0) + 0.01 * s * (1 + len(r) % 3)) / 100, show=[])
    report = make_report(runs_folder.path)
    every, decided = report.sections[0].tables
    assert report.sections[0].id == "overview"
    assert [row[0].link for row in every.rows] == [each.id for each in report.sections[1:7]]
    answers = {row[0].text: [cell.text for cell in row] for row in every.rows}
    assert answers["s3"][1] == "Does b differ from a on 1 measurement?"
    assert answers["s3"][2].startswith("1 of 1 difference from a is significant")
    assert answers["s0"][2].startswith("The difference from a is not significant")
    # Nothing is above QT, whatever the paper says: every claim that it is differs.
    verdicts = {row[0].sub: row[2].mark for row in decided.rows}
    assert set(verdicts.values()) == {"bad"}
    counts = dict(reversed(each.split(" ", 1)) for each in answers["lmcl-table4"][-1].split(", "))
    assert int(counts["differ"]) == len(verdicts)
    assert f"contradict {len(verdicts)}" in report.findings[0]
    out = runs_folder.path.parent
    write_report(runs_folder.path, out / "out.html")
    html, page = ((out / name).read_text() for name in ("out.html", "out/s3-small.html"))
    assert '<a href="out/s3-small.html">s3</a>' in html
    assert 'href="../out.html"' in page
    of_s3 = 'id="s3-small"'
    assert (html.count(of_s3), page.count(of_s3), page.count('id="s2-small"')) == (0, 1, 0)
    assert len(page) < 900_000 < (out / "out" / "vega.js").stat().st_size + len(page)
    # Every link of the index leads to a file.
    for link in re.findall(r'href="(out/[^"]+)"', html):
        assert (out / link).is_file()


def two_rows(gaps, **more):
    """A suite of the rows a and b on columns, b above a by these gaps on the seeds."""
    more["values"] = lambda r, c, s: 0.5 + 0.001 * s + (gaps[c][s] / 100 if r == "b" else 0)
    return {"rows": [("a", "infonce", None), ("b", "dcl", "a")], "columns": list(gaps), **more}


def test_the_seeds_of_the_index_show_the_stated_effect(runs_folder):
    gaps = {"x": [0.0, 2.0, 4.5, -1.0, 1.0]}
    tests = findings.planned(runs_folder.results("s", **two_rows(gaps, seeds=range(5))))
    cell = findings.more_seeds(tests)
    spread = np.std(gaps["x"], ddof=1)
    assert cell.sub == "for 1 point"
    assert power(1.0, spread, 5 + cell.sort, is_paired=True) >= 0.8 > power(1.0, spread, 4 + cell.sort, is_paired=True)
    today = power(1.0, spread, 5, is_paired=True)
    assert findings.power_cell(tests).sort == pytest.approx(today)
    said = f"Half of the tests have a power of at least {100 * today:.0f} % for 1 point (Holm)."
    assert findings.of_power(tests) == [said]
    wide = runs_folder.results("wide", **two_rows({"x": [-5.0, 9.0]}, seeds=range(2)))
    assert findings.of_suite(wide)[-1] == "Only a difference above 100 points would show in x."


def test_suites_of_a_report_are_in_the_order_of_the_papers(runs_folder):
    names = ["zebra", "apple-9", "apple-10", "arora-table1-cifar100", "lmcl-table4-mine", "lmcl-figure4"]
    names += ["cacr-table2", "cacr-table10", "cacr-figure9", "cllr-table2"]
    suites = [runs_folder.results(name, **two_rows({"x": [1.0, 2.0, 3.0]})) for name in sorted(names)]
    assert [each.manifest.suite for each in sorted(suites, key=findings.by_paper)] == names


def test_a_row_without_a_base_is_tested_against_the_base_of_its_column(runs_folder):
    """As in tables of one option, whose values are the columns."""
    by_column = {"x": [0.50, 0.51, 0.52], "y": [0.53, 0.55, 0.54], "z": [0.50, 0.51, 0.53]}
    rows, columns = [("a", "infonce", None), ("b", "dcl", "a")], [("x", "vision"), ("y", "text"), ("z", "toy")]
    manifest = runs_folder.suite("s", rows, columns, lambda row, column, seed: by_column[column][seed])
    bases = [column.model_copy(update={"base": "x"}) for column in manifest.columns]
    suite = runs_folder.read(manifest.model_copy(update={"columns": bases}))
    assert suite.cell("a", "x").against_base is None
    assert suite.cell("a", "y").against_base.difference == pytest.approx(3.0)
    assert suite.cell("a", "z").against_base.difference == pytest.approx(1 / 3)
    assert suite.cell("b", "y").against_base.difference == 0
    assert len(suite.tested) == 2 + 3
    assert [cell.base for cell in suite.cells] == ["x", "x", "x", "a", "a", "a"]
    assert findings.question(suite) == "Does b differ from a on 3 measurements?"
    one = runs_folder.suite("one", rows[:1], columns, lambda row, column, seed: by_column[column][seed])
    alone = runs_folder.read(one.model_copy(update={"columns": bases}))
    assert findings.question(alone) == "How far is a on 2 measurements from x?"


@pytest.mark.parametrize(("others", "is_open"), [(0, False), (3, True), (8, True)])
def test_an_interval_without_zero_that_is_not_significant_says_why(runs_folder, others, is_open):
    """b is above a with p of about 0.03 alone: among more tests it is not significant."""
    noise = np.random.default_rng(0)
    gaps = {"x": [1.0, 2.6, 1.2, 3.4, 0.2]} | {f"y{i}": list(noise.normal(size=5)) for i in range(others)}
    suite = runs_folder.results("s", **two_rows(gaps, seeds=range(5)))
    test = suite.cell("b", "x").against_base
    assert test.low > 0
    assert 0.05 / 4 < test.p_t < 0.05
    sheet = tables.cells_table(suite)
    (row,) = [row for row in sheet.rows if row[0].text == "b" and row[1].text == "x"]
    said = row[sheet.head.index("p (Holm)")].sub
    assert said == (f"not significant by Holm over {others + 1} tests" if is_open else "")
    caption = charts.against_base(suite)["x"].caption
    assert (said in caption) if is_open else ("excludes 0" not in caption)


@pytest.mark.parametrize(("count", "protocol"), [(1, {}), (6, {"epochs": 5, "data": "half of mine"})])
def test_suites_of_ones_own_mention_no_paper(runs_folder, tmp_path, count, protocol):
    for i in range(count):
        shown = ["curves", "histogram", "columns"] if i == 0 else []
        suite = two_rows({"x": [1.0, 2.0, 3.0]}, protocol=protocol, show=shown)
        runs_folder.suite(f"s{i}", **suite | {"columns": [("x", "vision")]})
    for name in ("out.html", "out.md"):
        write_report(runs_folder.path, tmp_path / name)
    for path in [*tmp_path.rglob("*.html"), tmp_path / "out.md"]:
        shown = re.sub(r"<(script|style|template)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        assert not re.search("paper|printed", shown.lower())
        assert not protocol or "half of mine" in shown or path.name == "out.html"


def test_runs_at_one_point_and_runs_that_gained_nothing_are_named(runs_folder):
    rows = [("a", "infonce", None), ("b", "none", "a"), ("c", "dcl", "a")]
    for job in runs_folder.suite("s", rows, [("x", "vision")], lambda *_: 0.5).jobs:
        (cell,) = job.cells
        start = 0.6 if cell.row == "c" and cell.seed < 2 else 0.4
        results = {"linear/accuracy": 0.5, "untrained/linear/accuracy": start}
        point = {"mean_distance": 0.001 if cell.row in ("a", "b") else 0.3}
        damaged(runs_folder, f"{job.hash}/record.json", results=results, diagnostics=point)
    (section,) = make_report(runs_folder.path).sections
    first, second, *_ = section.notes
    # `none` has no contrast that could draw embeddings apart.
    assert first.startswith("3 of 6 runs ended with all embeddings near one point (mean distance below 0.01): 3 of a.")
    assert second == "x: 2 of 6 runs not above the untrained encoder."
