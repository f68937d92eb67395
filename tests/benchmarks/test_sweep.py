"""`dipole sweep`: the space, the search on a validation part, restarts, pruning, the winner on the test part."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dipole.benchmarks.report.write import make_report
from dipole.benchmarks.run.engine import EngineTask, LocalEngine
from dipole.benchmarks.run.worker import ask_to_stop
from dipole.benchmarks.suite import Job
from dipole.benchmarks.sweep import search, study
from dipole.benchmarks.sweep.search import sweep
from dipole.benchmarks.sweep.study import SWEEPS, SearchSummary, Study, read_summaries
from dipole.core.record import read_part, read_record
from dipole.core.train.recipe import load_recipe
from dipole.core.utils.errors import ConfigError
from tests.benchmarks.conftest import Here, wait_for
from tests.runs import refused

RECIPE = "gaussian-classes"
SHORT = (
    "train.steps=4", "train.evaluate_every=2", "train.warmup=0", "train.batch_size=32", "toy.points=64",
    "toy.test_points=40",
)  # fmt: skip
SPACE = ("objective.infonce.temperature=log(0.05, 1)", "train.optimizer=choice(adam, sgd)")


def quietly(space=SPACE, trials=3, **options):
    options = {"metric": "knn/accuracy", "overrides": SHORT, "seeds": 1, "engine": "pool"} | options
    return sweep(RECIPE, space, trials=trials, **options)


def test_a_space_is_read_as_it_is_written():
    written = ["a.b=log(1e-4, 1)", "c=int(1, 8)", "e = uniform(-1,2)"]
    space = study.read_space([*written[:2], "d=choice(adam, 'sgd', 3, true, dcl(rho=0.1, temperature=1))", written[2]])
    assert space[0] == study.Dimension("a.b", "log", (1e-4, 1.0))
    assert space[2].values == ("adam", "sgd", 3, True, "dcl(rho=0.1, temperature=1)")
    assert study.read_space([str(each) for each in space]) == space
    shown = study.corners(space)
    assert {each["d"] for each in shown} == set(space[2].values)
    assert {each["a.b"] for each in shown} == {1e-4, 1.0}


def test_values_become_overrides_and_the_objective_is_rewritten():
    values = {"objective.dp.weight": 0.3, "objective.infonce.temperature": 0.1, "train.optimizer": "sgd"}
    found = study.settings(values, "infonce + 0.1*dp(delta_pos=0.2)")
    assert found[0] == 'train.optimizer="sgd"'
    assert found[1] == 'objective="infonce(temperature=0.1) + 0.3*dp(delta_pos=0.2)"'
    assert study.settings({"objective": "dcl", "objective.dcl.rho": 0.2}, "infonce") == ['objective="dcl(rho=0.2)"']
    twice = study.settings({"objective.infonce.1.temperature": 1.0}, "infonce + infonce")
    assert twice[0].endswith('"infonce + infonce(temperature=1.0)"')
    refused(ConfigError, "no term 'dc'", study.settings, {"objective.dc.rho": 1.0}, "dcl")


def test_a_search_chooses_on_validation_and_tests_its_winner(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "make_engine", lambda *_, **__: Here())
    with pytest.raises(ConfigError, match=r"no 'knn/acuracy'\. Did you mean 'knn/accuracy'"):
        quietly(runs=tmp_path, trials=1, metric="knn/acuracy", name="wrong")
    (tmp_path / SWEEPS / "wrong.json").unlink()
    assert quietly(runs=tmp_path, trials=1) == 0
    (path,) = (tmp_path / SWEEPS).glob("*.json")
    found = read_part(path, SearchSummary)
    assert [each.state for each in found.trials] == ["complete"] * 1
    # Once more is nothing new. More trials go on where it stopped.
    before = path.read_text()
    assert quietly(runs=tmp_path, trials=1) == 0
    assert json.loads(path.read_text()) == json.loads(before)
    assert quietly(runs=tmp_path, trials=2) == 0
    found = read_part(path, SearchSummary)
    assert [each.state for each in found.trials] == ["complete"] * 2
    assert read_summaries(tmp_path) == ([found], [])
    records = [read_record(tmp_path / trial.run / "record.json") for trial in found.trials]
    for trial, record in zip(found.trials, records, strict=True):
        assert record.evaluated_on == "validation"
        assert trial.value == record.results["knn/accuracy"]
        assert f"temperature={trial.values['objective.infonce.temperature']!r}" in record.objective
        assert record.config["train"]["optimizer"] == trial.values["train.optimizer"]
    best = max(found.trials, key=lambda trial: (trial.value, -trial.number))
    assert found.trials[found.best].value == best.value
    winners = [read_record(tmp_path / run / "record.json") for run in found.winner]
    assert [record.seed for record in winners] == [0]
    assert {record.evaluated_on for record in winners} == {"test"}
    assert {record.objective for record in winners} == {records[found.best].objective}
    # The report states how many trials were spent and both numbers. Trials are not listed as runs.
    (tmp_path / SWEEPS / "damaged.json").write_text("{")
    report = make_report([tmp_path, tmp_path / SWEEPS / ".."])
    (section,) = [each for each in report.sections if each.id.startswith("search-")]
    assert "2 trials (2 complete)" in section.subtitle
    (winner,) = [table for table in section.tables if table.title == "The winner"]
    tested = read_record(tmp_path / found.winner[0] / "record.json").results["knn/accuracy"]
    assert [row[1].sort for row in winner.rows] == [found.trials[found.best].value, tested]
    (others,) = [each for each in report.sections if each.id == "other-runs"]
    shown = {cell.text for row in others.tables[0].rows for cell in row}
    assert not shown & {trial.run for trial in found.trials}
    assert any("damaged.json" in cell.text for table in report.tables for row in table.rows for cell in row)


@pytest.mark.parametrize(("change", "said"), [
    ({"space": ("train.optimizr=choice(adam)",)}, "train.optimizr: no such setting"),
    ({"space": ("objective.infonce.temperature=uniform(-1, 1)",)}, "must be a number > 0"),
    ({"space": ("objective.dp.weight=uniform(0, 1)",)}, "no term 'dp'"),
    ({"name": "../elsewhere"}, "is no name of a file"), ({"space": ()}, "needs --space"),
    ({"space": ("a",)}, "not of the form"), ({"space": ("a=1",)}, "not of the form"),
    ({"space": ("a=lgo(1, 2)",)}, "unknown kind 'lgo'"), ({"space": ("a=log(0, 1)",)}, "above 0"),
    ({"space": ("a=log(1)",)}, "needs two numbers"), ({"space": ("a=uniform(2, 1)",)}, "below the second"),
    ({"space": ("a=int(1, 2.5)",)}, "whole numbers"),
    ({"space": ("a=uniform(1, inf)",)}, "needs two numbers"),
    ({"space": ("a=choice()",)}, "needs at least one value"),
])  # fmt: skip
def test_what_is_wrong_with_a_search_is_said(tmp_path, change, said):
    refused(ConfigError, said, quietly, runs=tmp_path, trials=1, **change)


def test_a_trial_whose_process_is_gone_is_proposed_again_and_another_search_is_refused(tmp_path):
    space = study.read_space(SPACE)
    first = Study(tmp_path / "{my}?%20", space, {"metric": "a"}, True, 0)
    _, values = first.ask(5)
    second = Study(tmp_path / "{my}?%20", space, {"metric": "a"}, True, 0)
    assert second.ask(5)[1] != values  # the other process still works on it
    first.close()
    third = Study(tmp_path / "{my}?%20", space, {"metric": "a"}, True, 0)
    trial, again = third.ask(5)
    assert again == values
    assert [each.number for each in third.spent()] == [1, trial.number]
    # Two processes draw different values.
    assert third.ask(5)[1] != second.ask(5)[1]
    assert third.ask(4) is None
    refused(ConfigError, "is another one: metric differ", Study, tmp_path / "{my}?%20", space, {"metric": "b"}, True, 0)


def test_a_run_that_is_asked_to_stop_saves_and_ends(tmp_path):
    overrides = [*SHORT, "train.steps=40000", "train.evaluate_every=40000", "train.log_every=1"]
    config = load_recipe(RECIPE, overrides).config
    job = Job(config.hash, config, RECIPE, tuple(overrides))

    def stop_soon():
        metrics = tmp_path / job.hash / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size, "metrics")
        ask_to_stop(tmp_path, job.hash)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stop_soon)
        (result,) = LocalEngine(1, 1, []).run([EngineTask(job.hash, "one", job.command)], tmp_path)
    assert result.status == "failed"
    record = read_record(tmp_path / job.hash / "record.json")
    assert record.status == "interrupted"
    assert 0 < record.steps < 40000
    assert not list((tmp_path / ".bench" / "stops").iterdir())


@pytest.mark.slow
def test_a_killed_search_goes_on_and_loses_no_trial(tmp_path):
    command = [
        sys.executable, "-m", "dipole", "sweep", RECIPE, "--set", *SHORT, "--space", *SPACE,
        "--metric", "knn/accuracy", "--trials", "6", "--seeds", "1", "--runs", str(tmp_path), "--name", "mine",
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = tmp_path / SWEEPS / "mine.json"
    while not path.exists() or not any(t.state == "complete" for t in read_part(path, SearchSummary).trials):
        assert child.poll() is None
        time.sleep(0.2)
    child.kill()
    child.wait()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    found = read_part(path, SearchSummary)
    assert [each.state for each in found.trials] == ["complete"] * 6
    assert len({trial.run for trial in found.trials}) == 6
