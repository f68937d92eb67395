"""Suites as data: expansion into jobs, sharing of runs, errors that name everything at once, shipped suites."""

import io
import sys

import numpy as np
import pytest
from scipy import stats

from dipole.benchmarks.claims import published
from dipole.benchmarks.manifest import read_manifests, read_records, write_manifest
from dipole.benchmarks.plan import Estimator, make_plan
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.charts import pictures
from dipole.benchmarks.report.tables import beside_table
from dipole.benchmarks.results_file import RunFiles
from dipole.benchmarks.run.bench import print_plan, reporter
from dipole.benchmarks.run.reference import START, work_of
from dipole.benchmarks.statistics import power
from dipole.benchmarks.suite import read_suite, suites
from dipole.benchmarks.suite_results import SuiteResults
from dipole.core.cli import main
from dipole.core.record import Histogram, read_record
from dipole.core.train.recipe import load_recipe
from dipole.core.utils.errors import ConfigError
from tests.benchmarks.conftest import suite_text, written
from tests.runs import refused

SUITE = """
name = "mine"
title = "Two objectives on digits"
base = "plain"

[[columns]]
name = "linear"
metric = "linear/accuracy"
factor = 100
unit = "%"
[[columns]]
name = "knn"
metric = "knn/accuracy"
[[columns]]
name = "long"
metric = "linear/accuracy"
set = ["train.epochs=4"]

[[rows]]
method = "plain"
objective = "infonce(temperature=0.5)"
[[rows]]
method = "polarized"
objective = "infonce(temperature=0.5) + 0.1*dp"
columns = ["linear", "knn"]
set = ["train.learning_rate=0.002"]

[scale.small]
recipe = "digits-simclr"
seeds = [0, 1]
set = ["train.epochs=2", "train.learning_rate=0.001"]
protocol = { dataset = "digits" }
"""


@pytest.fixture
def suite_file(tmp_path):
    return written(tmp_path, SUITE)


def recorded(runs_folder, jobs, values):
    """Return a finished record for each job, with what `values` says of it."""
    found = {}
    for job in jobs:
        record = read_record(runs_folder.path / runs_folder.record(**values(job)) / "record.json")
        more = {"hash": job.hash, "config": job.config.model_dump(mode="json")}
        found[job.hash] = record.model_copy(update=more)
    return found


def test_cells_with_equal_settings_share_a_run_whose_command_repeats_it(suite_file):
    sized = read_suite(suite_file).at("small")
    jobs = sized.jobs()
    assert sum(1 for _ in sized.cells()) == 2 * (3 + 2)
    # plain: one run for linear and knn and one for long. polarized: one. All of it for two seeds.
    assert len(jobs) == len({job.hash for job in jobs}) == 6
    shared = next(job for job in jobs if len(job.cells) == 2)
    assert {cell.column for cell in shared.cells} == {"linear", "knn"}
    for job in jobs:
        is_polarized = job.cells[0].row == "polarized"  # later settings win
        assert job.config.train.learning_rate == (0.002 if is_polarized else 0.001)
        assert job.config.train.epochs == (4 if job.cells[0].column == "long" else 2)
        command, recipe, *flags = job.command
        assert command == "train"
        assert flags[::2] == ["--set"] * (len(flags) // 2)
        assert load_recipe(recipe, flags[1::2]).config.hash == job.hash


def test_bad_settings_are_reported_together(tmp_path):
    path = written(tmp_path, SUITE.replace('infonce(temperature=0.5)"', 'infonse"').replace("0.002", "-1"))
    with pytest.raises(ConfigError) as caught:
        read_suite(path).at("small").jobs()
    assert "infonse" in str(caught.value)
    assert "learning_rate" in str(caught.value)
    assert "'polarized'" in str(caught.value)
    # A problem that several cells share is said once.
    assert str(caught.value).count("infonse'") == 1
    assert "row 'plain', column 'linear' and 2 more" in str(caught.value)
    refused(ConfigError, "lmcl-table4", read_suite, "lmcl-tabel4")
    refused(ConfigError, "small", read_suite(path).at, "paper")


@pytest.mark.parametrize(("old", "new", "message"), [
    ('base = "plain"', 'base = "plane"', "plain"),
    ('columns = ["linear", "knn"]', 'columns = ["lineer"]', "linear"),
    ("seeds = [0, 1]", "seeds = []", "seeds"),
    ("seeds = [0, 1]", "seeds = [0, -1]", "greater than or equal to 0"),
    ('title = "Two objectives on digits"', 'titel = "x"', "titel"),
    ('name = "mine"', 'name = "mine"\npublished = "lmcl-table9"', "lmcl-table9"),
    ('name = "mine"', 'name = "mine"\npublished = "cacr-table6"', "no row of cacr-table6"),
    ('method = "plain"', 'method = "polarized"', "twice"), ('name = "mine"', "name = ", "TOML"),
    ('name = "mine"', 'name = "../mine"', "names files"),
    ('name = "mine"', 'name = "mine"\nbasis = "plain"', "basis: no such setting. Did you mean 'base'"),
    ('metric = "knn/accuracy"', 'metric = "knn/accuracy"\nfactors = 2', "Did you mean 'factor'"),
    ("seeds = [0, 1]", "seeds = [1, 1]", "a seed twice"),
    ('"train.epochs=4"', '"train.epochs"', "not of the form key=value"),
])  # fmt: skip
def test_a_wrong_suite_is_refused_by_name(tmp_path, old, new, message):
    refused(ConfigError, message, read_suite, written(tmp_path, SUITE.replace(old, new, 1)))


def test_plan_counts_and_learns_from_records(suite_file, runs_folder, capsys):
    sized = read_suite(suite_file).at("small")
    jobs = sized.jobs()
    plan = make_plan(sized, jobs, {}, 2, None)
    assert (plan.jobs, plan.finished, plan.time.reckoned) == (6, 0, 6)
    assert 0 < plan.time.seconds < 3600
    values = {0: 0.90, 1: 0.94}
    results = {seed: {"linear/accuracy": value} for seed, value in values.items()}
    records = recorded(runs_folder, jobs[:2], lambda job: {"results": results[job.config.seed], "wall_seconds": 30.0})
    plan = make_plan(sized, jobs, records, 2, None)
    assert plan.finished == 2
    # Four left: polarized is known by the settings but for the rate. Nothing is as long as long, so the table is asked.
    longer = Estimator([]).total([job.config for job in jobs if job.config.train.epochs == 4], 1)
    assert (plan.time.reckoned, longer.reckoned) == (2, 2)
    assert plan.time.seconds == pytest.approx((2 * (30 + START) + longer.seconds) / 2)
    linear = next(line for line in plan.seeds if line.column == "linear")
    assert linear.std == pytest.approx(100 * 0.04 / 2**0.5)
    assert linear.difference == 1.0
    narrow, wide = (make_plan(sized, jobs, records, 2, effect).seeds[0].seeds for effect in (2.0, 8.0))
    assert wide < narrow < linear.seeds
    # Two seeds are planned, whatever difference is asked for, and two tests are made: linear and knn of polarized.
    assert power(linear.detectable, linear.std, 2, 0.05 / 2) == pytest.approx(0.8)
    assert make_plan(sized, jobs, records, 2, 8.0).seeds[0].detectable == linear.detectable
    results[0]["linear/accuracy"] = 0.1
    records = recorded(runs_folder, jobs[:2], lambda job: {"results": results[job.config.seed]})
    print_plan(sized, make_plan(sized, jobs, records, 2, 1e-6))
    said = capsys.readouterr().out
    assert [said.count(text) for text in ("over 1,000,000", "none below 100")] == [1, 1]


def test_a_plan_pairs_by_seed_as_the_report_does(suite_file, runs_folder):
    sized = read_suite(suite_file).at("small")
    jobs = sized.jobs()
    gains = {("plain", 0): 0.0, ("plain", 1): 0.0, ("polarized", 0): 0.01, ("polarized", 1): 0.012}

    def values(job):
        value = 0.5 + 0.2 * job.config.seed + gains[job.cells[0].row, job.config.seed]
        return {"results": {"linear/accuracy": value, "knn/accuracy": value}}

    records = recorded(runs_folder, jobs, values)
    plan = make_plan(sized, jobs, records, 1, 1.0)
    linear = plan.seeds[0]
    assert linear.std == pytest.approx(0.2 / 2**0.5)  # the spread of a row is 14 points, and both rows share it
    assert power(linear.detectable, linear.std, 2, 0.05 / plan.tests, True) == pytest.approx(0.8)
    assert power(1.0, linear.std, linear.seeds, 0.05 / 2, True) >= 0.8
    report = SuiteResults(sized.manifest(jobs), records)
    assert [line.detectable for line in plan.seeds[:2]] == [report.detectable("linear"), report.detectable("knn")]


def test_columns_of_the_same_runs_and_metric_are_one_test(runs_folder):
    rows = [("a", "infonce", None), ("b", "dcl", "a")]
    gaps = {"x": (1.0, 1.5, 1.2), "z": (0.1, -0.1, 0.2)}
    values = {("b", x): [gap / 100 for gap in each] for x, each in gaps.items()}
    measured = [("x", "vision"), ("z", "vision")]
    manifest = runs_folder.suite("s", rows, measured, lambda r, c, s: 0.5 + s / 100 + values.get((r, c), [0] * 3)[s])
    (x, z), jobs = manifest.columns, manifest.jobs
    again = [cell.model_copy(update={"column": f"again {cell.column}"}) for job in jobs for cell in job.cells]
    jobs = [job.model_copy(update={"cells": [*job.cells, one]}) for job, one in zip(jobs, again, strict=True)]
    columns = [*manifest.columns, *(each.model_copy(update={"name": f"again {each.name}"}) for each in (x, z))]
    twice = runs_folder.read(manifest.model_copy(update={"columns": columns, "jobs": jobs}))
    once = runs_folder.read(manifest)
    assert once.cell("b", "x").p_holm == pytest.approx(2 * stats.ttest_1samp(gaps["x"], 0).pvalue)
    assert [twice.cell("b", name).p_holm for name in ("x", "again x")] == [once.cell("b", "x").p_holm] * 2
    assert (len(once.tested), len(twice.tested), twice.planned_tests) == (2, 2, 2)
    assert findings.of_differences(twice) == findings.of_differences(once)


@pytest.mark.parametrize(("metric", "spread", "tenth"), [("diag/rank", 3.0, 3.15), ("cost/wall_seconds", 5.0, 6.25)])
def test_the_plan_knows_the_spread_of_diagnostics_and_costs(suite_file, runs_folder, metric, spread, tenth):
    suite_file.write_text(suite_file.read_text().replace('metric = "knn/accuracy"', f'metric = "{metric}"'))
    sized = read_suite(suite_file).at("small")
    ranks = [{"diagnostics": {"rank": 30.0 + 3 * seed}, "wall_seconds": 60.0 + 5 * seed} for seed in (0, 1)]
    records = recorded(runs_folder, sized.jobs()[:2], lambda job: ranks[job.config.seed])
    (line,) = [line for line in make_plan(sized, sized.jobs(), records, 1, None).seeds if line.column == "knn"]
    assert {each.higher_is_better for each in sized.columns if each.name == "knn"} == {metric == "diag/rank"}
    assert line.std == pytest.approx(spread / 2**0.5)
    assert line.difference == pytest.approx(tenth)  # of the mean


def test_estimates_prefer_the_nearest_earlier_run(suite_file, runs_folder):
    job = read_suite(suite_file).at("small").jobs()[0]
    base = read_record(runs_folder.path / runs_folder.record() / "record.json")
    config = job.config.model_dump(mode="json")
    same = base.model_copy(update={"config": {**config, "seed": 9}, "wall_seconds": 10.0})
    other = base.model_copy(update={"config": {**config, "objective": "dcl"}, "wall_seconds": 50.0})
    assert Estimator([other]).seconds(job.config) == 50.0
    assert Estimator([other, same]).seconds(job.config) == 10.0
    assert Estimator([]).seconds(job.config) is None
    # Each run starts a process, unless runs share processes.
    many = [job.config] * 6
    assert Estimator([same]).total(many, 2).seconds == 3 * (10 + START)
    assert Estimator([same]).total(many, 2, shares_processes=True).seconds == 3 * 10 + START
    assert Estimator([]).total([], 1).seconds == 0
    assert Estimator([]).total([job.config], 1).seconds > START
    runs_folder.record(config={"train": 5, "domain": ["x"]})  # an odd configuration stops nothing
    Estimator(read_records(runs_folder.path).done.values())


@pytest.mark.parametrize("name", ["lmcl-table5", "cllr-table4"])
def test_control_tables_carry_a_row_without_contrast(name, tmp_path):
    suite = read_suite(name)
    (control,) = [row for row in suite.rows if row.objective == "none"]
    assert control.label not in {row.label for row in published.tables()[name].rows}
    for scale in suite.scale:
        of_control = [job for job in suite.at(scale).jobs() if job.cells[0].row == control.label]
        assert all(job.config.objective == "none" for job in of_control)
    # Beside the paper's numbers it has a dash.
    sheet = beside_table(SuiteResults(suite.at("small").manifest(suite.at("small").jobs()), {}))
    printed = {row[0].text: row[3].text for row in sheet.rows}
    assert printed[control.label] == "-"
    assert any(text not in ("-", "") for text in printed.values())
    # Only a row that says it is a control may go beyond the printed ones.
    text = suites()[name].read_text()
    assert "control = true" in text
    refused(ConfigError, "no row of", read_suite, written(tmp_path, text.replace("control = true", "control = false")))


def test_seeds_of_the_command_replace_those_of_the_scale_and_are_read_once(suite_file):
    jobs = read_suite(suite_file).at("small", seeds=3).jobs()
    assert {job.config.seed for job in jobs} == {0, 1, 2}
    assert {job.hash for job in read_suite(suite_file).at("small").jobs()} < {job.hash for job in jobs}
    assert len({id(job.config.settings) for job in jobs}) == len(jobs) / 3
    for job in jobs:
        alone = load_recipe(job.recipe, job.overrides).config
        assert (alone.hash, alone.seed) == (job.hash, job.config.seed)


@pytest.mark.parametrize(("setting", "said"), [
    ("train.epoch=3", r"row 'plain', column.* more: .*train\.epoch: no such setting\. Did you mean 'epochs'\?"),
    ("train.epochs", r"'train\.epochs' is not of the form"),  # `train.epochs=` takes the recipe's value away
    ("objective=dcl", "objective"), ("seed=3", "seed"), ("name=x", "name"),
])  # fmt: skip
def test_overrides_that_are_wrong_everywhere_or_that_the_suite_says_itself_are_refused_once(suite_file, setting, said):
    suite = read_suite(suite_file)
    with pytest.raises(ConfigError, match=f"(?s){said}") as caught:
        suite.at("small", [setting]).jobs()
    assert str(caught.value).count("no such setting") <= 1
    # The others are a protocol of their own unless they say where things lie.
    assert suite.at("small", ["device=cpu", "text.senteval=elsewhere"]).protocol == {"dataset": "digits"}
    changed = suite.at("small", ["train.epochs=1"]).protocol
    assert changed == {"dataset": "digits", "changed by --set": "train.epochs=1"}


def test_a_suite_that_hides_its_differences_is_held_against_the_shipped_one(tmp_path):
    """The paper's table filled from digits, and no word of it: the differences are found, so no verdict is given."""
    text = suite_text([("SimCLR (CL)", "infonce(temperature=0.5)")], [("CIFAR-10", "knn/accuracy")])
    path = written(tmp_path, 'published = "cacr-table6"\n' + text.replace("scale.small", "scale.paper"))
    sized = read_suite(path).at("paper")
    assert sized.protocol["metric"] == "knn/accuracy in place of linear/accuracy"
    assert "digits in place of cifar10" in sized.protocol["vision.data.source"]
    assert not sized.manifest(sized.jobs()).is_paper_protocol


@pytest.mark.slow
def test_the_plan_of_all_suites_has_a_line_for_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench", "--plan", "--runs", "none-yet", "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "unknown" not in shown
    lines = [line for line in shown.splitlines() if " to " in line and "(" in line]
    assert len(lines) == 1 + sum("small" in read_suite(name).scale for name in suites())
    assert "all (shared runs once)" in lines[-1]
    assert not (tmp_path / "none-yet").exists()


def test_rows_that_read_one_run_differently_share_it(tmp_path, runs_folder):
    path = tmp_path / "readings.toml"
    path.write_text(
        'name = "readings"\ntitle = "Two readings of one run"\n'
        '[[columns]]\nname = "accuracy"\nmetric = "{probe}/accuracy"\nfactor = 100\n'
        '[[rows]]\nmethod = "linear"\nobjective = "infonce"\nfill = { probe = "linear" }\n'
        '[[rows]]\nmethod = "neighbours"\nobjective = "infonce"\nbase = "linear"\nfill = { probe = "knn" }\n'
        '[scale.small]\nrecipe = "digits-simclr"\nseeds = [0, 1]\n'
    )
    sized = read_suite(path).at("small")
    jobs = sized.jobs()
    assert [len(job.cells) for job in jobs] == [2, 2]
    results = {seed: {"linear/accuracy": 0.9 + seed / 100, "knn/accuracy": 0.8} for seed in (0, 1)}
    records = recorded(runs_folder, jobs, lambda job: {"results": results[job.config.seed]})
    written = sized.manifest(jobs)
    path = write_manifest(tmp_path / "runs", written)
    assert read_manifests(tmp_path / "runs") == ([written], [])
    text = path.read_text()
    path.write_text(text[:100])
    assert [each.path for each in read_manifests(tmp_path / "runs")[1]] == [path]
    path.write_text(text)
    ((back,), _) = read_manifests(tmp_path / "runs")
    found = SuiteResults(back, records)
    assert found.samples("linear", "accuracy") == pytest.approx({0: 90.0, 1: 91.0})
    assert found.samples("neighbours", "accuracy") == pytest.approx({0: 80.0, 1: 80.0})
    assert found.cell("neighbours", "accuracy").against_base.difference == pytest.approx(-10.5)
    (line,) = make_plan(sized, jobs, records, 2, None).seeds
    assert line.std == pytest.approx(0.5**0.5)  # differences of 10 and 11
    (histogram,) = pictures(found, RunFiles(folder=tmp_path / "runs"))["Distance histograms"]  # one model, one picture
    assert histogram.caption == "linear, neighbours (test embeddings)"


def test_distances_of_correct_and_incorrect_pairs_are_drawn_where_a_suite_asks(tmp_path, runs_folder):
    sized = read_suite("lmcl-figure5").at("small", seeds=1)
    jobs = sized.jobs()
    counts = {"edges": [0.0, 0.5, 1.0], "all": [5.0, 5.0], "correct": [3.0, 1.0], "incorrect": [1.0, 7.0]}
    records = recorded(runs_folder, jobs, lambda job: {"histogram": Histogram(**counts), "results": {"next@10": 0.5}})
    shown = pictures(SuiteResults(sized.manifest(jobs), records), RunFiles(folder=tmp_path))["Distance histograms"]
    assert [each.caption for each in shown] == [f"{row.label} (held-out anchors and candidates)" for row in sized.rows]
    for picture in shown:
        drawn = [(row["series"], row["x"], row["y"]) for row in picture.chart.rows]
        assert drawn[:3] == [("correct (positives)", 0, 1.5), ("correct (positives)", 0.5, 0.5), (drawn[0][0], 1, 0)]
        assert drawn[3:] == [("incorrect (negatives)", x, y) for x, y in ((0, 0.25), (0.5, 1.75), (1, 0))]
    # Records from before they were counted show nothing.
    older = {name: record.model_copy(update={"histogram": None}) for name, record in records.items()}
    assert "Distance histograms" not in pictures(SuiteResults(sized.manifest(jobs), older), RunFiles(folder=tmp_path))


def test_a_row_may_have_another_recipe_and_objective_at_one_scale(suite_file):
    for name in ("lmcl-table2", "cllr-table3"):
        small, paper = (read_suite(name).at(scale) for scale in ("small", "paper"))
        (own,) = (row for row in small.rows if row.method == "SwAV")
        assert own.recipe is None
        for job in paper.jobs():
            mine = {cell.row for cell in job.cells} == {"SwAV"}
            assert mine == (job.recipe == "imagenet100-swav")
            if mine:
                vision = job.config.settings
                assert job.config.objective.startswith("swav(prototypes=3000")
                assert job.config.train.optimizer == "lars"
                assert (vision.views, vision.swav.small_views, vision.negatives in (1024, 4096)) == (2, 6, True)
                large, *_, tiny = vision.framework.augmentations(vision)
                assert (large.size, large.crop_scale) == (224, (0.14, 1.0))
                assert (tiny.size, tiny.crop_scale) == (96, (0.05, 0.14))
                assert large.kernel(224) == tiny.kernel(96)
    suite_file.write_text(suite_file.read_text() + '\n[scale.small.change.nobody]\nrecipe = "x"\n')
    refused(ConfigError, "change: 'nobody' is no row of scale 'small'", read_suite, suite_file)


@pytest.mark.parametrize("name", ["lmcl-table5", "cllr-table4"])
def test_scores_at_500_000_steps_are_read_from_the_run_of_those_at_100_000(name):
    table, longer = read_suite(name).at("paper"), read_suite(f"{name}-500k").at("paper")
    assert [(row.label, row.objective) for row in longer.rows] == [(row.label, row.objective) for row in table.rows]
    columns = [f"{column.name}: {score}" for column in table.columns for score in ("100k", "500k")]
    assert [column.name for column in longer.columns] == columns
    for ours, theirs in zip(longer.jobs(), table.jobs(), strict=True):
        cells = [(cell.row, cell.column.partition(":")[0], cell.seed) for cell in ours.cells]
        assert set(cells) == {(cell.row, cell.column, cell.seed) for cell in theirs.cells}
        assert [cell.column.endswith("500k") for cell in ours.cells] == [False, True]
        one, other = ours.config, theirs.config
        assert (one.train.steps, one.train.model_copy(update={"steps": 100_000})) == (500_000, other.train)
        assert (one.settings, one.objective) == (other.settings, other.objective)


def test_detection_is_filled_by_what_is_added_to_the_runs():
    jobs = read_suite("cacr-table5").at("paper").jobs()
    assert [len(job.cells) for job in jobs] == [9] * 7
    others = {job.hash for name in ("cacr-table3", "cacr-table4") for job in read_suite(name).at("paper").jobs()}
    assert len({job.hash for job in jobs} & others) == 5  # supervised and AU-CL are this table's own


def test_a_file_of_small_images_is_reckoned_as_such(tmp_path):
    """Sizes that the header of a file tells are those of the data set known by name: the same work."""
    images, labels = np.zeros((1000, 32, 32, 3), np.uint8), np.arange(1000) % 10
    np.savez_compressed(tmp_path / "own.npz", images=images, labels=labels)
    limit = "vision.data.limit=600"
    here = [f"vision.data.{part}={tmp_path / 'own.npz'}" for part in ("source", "test")]
    named, own = (work_of(load_recipe("cifar10-simclr", [limit, *more]).config) for more in ([], here))
    assert own is not None
    assert own == named


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(terminal, monkeypatch):
    """Kernels of notebooks set FORCE_COLOR, which what they start inherits."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with reporter(2) as report:
        report(0, 0, 20.0, "2 runs, 1 at a time")
        report(1, 0, 10.0, "done    0123")
        report(2, 0, 0.0, "done    4567")
    plain = "[0/2] 2 runs, 1 at a time; about 20s left\n[1/2] done    0123; about 10s left\n[2/2] done    4567\n"
    said = stream.getvalue()
    assert ("\x1b[" in said, said == plain) == (terminal, not terminal)
    assert (said.count("2/2") > 1, "about 0s left" in said) == (terminal, terminal)
