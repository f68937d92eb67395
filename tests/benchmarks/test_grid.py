"""Grids: what they multiply out to, and what is said of one that is wrong."""

import tomllib
from pathlib import Path

import pytest

from dipole.benchmarks.grid import expand
from dipole.benchmarks.results_file import SHIPPED, read_results_file, results_files, stored_overrides
from dipole.benchmarks.suite import read_suite, suites
from dipole.core.cli import main
from dipole.core.utils.errors import ConfigError
from tests.benchmarks.conftest import written

SUITE = """
name = "mine"
title = "mine"
base = "infonce"
[grid]
temperature = [0.1, 0.5]
[[columns]]
name = "{data}/batch={batch}"
metric = "knn/accuracy"
set = ["train.batch_size={batch}", "train.learning_rate={rate}"]
[columns.grid]
data = [{ name = "digits" }, { name = "few", set = ["vision.data.limit=500"] }]
batch = [32, 64]
rate = [1e-3, 2e-3]
zip = [["batch", "rate"]]
exclude = [{ data = "few", batch = 64 }]
[[rows]]
method = "infonce"
objective = "infonce"
[[rows]]
method = "dp"
objective = "infonce(temperature=1) + 0.1*dp"
[[rows]]
method = "no temperature"
objective = "align_uniform"
[scale.small]
recipe = "digits-simclr"
seeds = [0]
"""


@pytest.mark.parametrize("path", results_files(SHIPPED), ids=lambda path: path.name)
def test_committed_runs_belong_to_jobs_of_their_suite_as_it_is_now(path):
    """A changed row, setting or seed gives other run ids. Then the committed runs no longer count."""
    kept = read_results_file(path)
    changed = stored_overrides([path]).get((kept.manifest.suite, kept.manifest.scale), [])
    jobs = read_suite(kept.manifest.suite).at(kept.manifest.scale, changed).jobs()
    assert kept.runs
    assert all(run.record.status == "done" for run in kept.runs.values())
    assert kept.runs.keys() <= {job.hash for job in jobs}


def test_axes_are_multiplied_zipped_and_excluded_and_bases_follow(tmp_path):
    sized = read_suite(written(tmp_path, SUITE)).at("small")
    labels = [f"{name}, temperature={value}" for name in ("infonce", "dp") for value in (0.1, 0.5)]
    assert [row.label for row in sized.rows] == [*labels, "no temperature"]
    objectives = [f"infonce(temperature={value}){more}" for more in ("", " + 0.1*dp") for value in (0.1, 0.5)]
    assert [row.objective for row in sized.rows] == [*objectives, "align_uniform"]
    assert [sized.base_of(row) for row in sized.rows[:4]] == [None, None, *labels[:2]]
    assert [column.name for column in sized.columns] == ["digits/batch=32", "digits/batch=64", "few/batch=32"]
    assert sized.columns[2].set == ("train.batch_size=32", "train.learning_rate=0.001", "vision.data.limit=500")
    job = sized.jobs()[0]
    assert (job.config.train.batch_size, job.config.train.learning_rate) == (32, 1e-3)
    assert len({job.hash for job in sized.jobs()}) == 15


def test_settings_weights_and_named_options_are_axes_and_defaults_give_way(tmp_path):
    text = SUITE.replace("temperature = [0.1, 0.5]", '"train.epochs" = [1, 2]\n"objective.dp.weight" = [0.1, 1]')
    rows = read_suite(written(tmp_path, text)).at("small").rows
    found = {row.label: (row.objective, row.set) for row in rows}
    weighted = ("infonce(temperature=1) + 1.0*dp", ("train.epochs=2",))
    assert found["dp, train.epochs=2, objective.dp.weight=1"] == weighted
    assert found["no temperature, train.epochs=1"] == ("align_uniform", ("train.epochs=1",))
    assert len(found) == 2 + 4 + 2
    found = expand({
        "column": {"metric": "a", "factor": 100}, "row": {"set": ["x=1"]},
        "columns": [{"name": "one"}, {"name": "two", "metric": "b"}], "rows": [{"method": "m", "objective": "infonce"}],
        "scale": {"small": {"columns": [{"name": "three"}]}},
    })  # fmt: skip
    assert [column["metric"] for column in found["columns"]] == ["a", "b"]
    assert found["scale"]["small"]["columns"] == [{"metric": "a", "factor": 100, "name": "three"}]
    assert found["rows"][0]["set"] == ["x=1"]


@pytest.mark.parametrize(("before", "after", "message"), [
    ("temperature = [0.1, 0.5]", "temperature = []", r"the axis 'temperature' is empty"),
    ("temperature = [0.1, 0.5]", "temperature = [0.1, 0.1]", r"has the value 0.1 twice"),
    ("temperature = [0.1, 0.5]", "temperature = 0.1", r"is a list of values, got 0.1"),
    ("temperature = [0.1, 0.5]", "temprature = [0.1]", r"nothing uses the axis 'temprature'.*'temperature'"),
    ("temperature = [0.1, 0.5]", "a = [{ set = [] }]", r"a value of 'a' that is a table needs a name"),
    ("batch = [32, 64]", "batch = [32, 64, 128]", r"as many values each, not batch 3, rate 2"),
    ('zip = [["batch", "rate"]]', 'zip = [["batch", "rat"]]', r"zip: no axis 'rat'.*'rate'"),
    ('zip = [["batch", "rate"]]', 'zip = ["batch", "rate"]', r"zip is a list of lists"),
    ('data = "few", batch = 64', 'data = "fwe"', r"exclude: 'fwe' is no value of data.*'few'"),
    ('data = "few", batch = 64', "batch = [32, 64]", r"exclude leaves nothing"),
    ('method = "dp"', 'method = "infonce"', r"names a row or a column twice: 'infonce, temperature=0.1'"),
    ("temperature = [0.1, 0.5]", '"train.batchsize" = [1, 2]', r"batchsize.*batch_size"),
])  # fmt: skip
def test_what_is_wrong_is_one_message(tmp_path, before, after, message):
    assert before in SUITE
    with pytest.raises(ConfigError, match=message):
        read_suite(written(tmp_path, SUITE.replace(before, after))).at("small").jobs()


def test_millions_of_cells_are_refused_with_their_number(tmp_path):
    axes = "\n".join(f"'train.x{number}' = {list(range(100))}" for number in range(3))
    with pytest.raises(ConfigError, match=r"1,000,000 points \(100 x 100 x 100\)"):
        read_suite(written(tmp_path, SUITE.replace("temperature = [0.1, 0.5]", axes)))
    text = SUITE.replace("temperature = [0.1, 0.5]", f"temperature = {[n / 1e4 for n in range(1, 2001)]}")
    with pytest.raises(ConfigError, match=r"120,030 cells \(4001 rows x 3 columns x 10 seeds\)"):
        read_suite(written(tmp_path, text.replace("seeds = [0]", f"seeds = {list(range(10))}")))


@pytest.mark.parametrize("name", ["lmcl-table5", "cllr-figure4", "mine"])
def test_a_suite_that_is_written_out_has_the_same_cells_and_no_grid(name, tmp_path, capsys):
    path = suites()[name] if name in suites() else written(tmp_path, SUITE)
    assert main(["show", str(path if name == "mine" else name), "--expand"]) == 0
    text = capsys.readouterr().out
    assert "grid" not in tomllib.loads(text)
    ours, theirs = read_suite(written(tmp_path, text, "again")), read_suite(path)
    assert ours.scale.keys() == theirs.scale.keys()
    for scale in ours.scale:
        mine, other = ours.at(scale, seeds=1), theirs.at(scale, seeds=1)
        assert ours.scale[scale].seeds == theirs.scale[scale].seeds
        assert (mine.rows, mine.columns, mine.seeds) == (other.rows, other.columns, other.seeds)
        assert [mine.base_of(row) for row in mine.rows] == [other.base_of(row) for row in other.rows]
        assert [(job.hash, job.cells) for job in mine.jobs()] == [(job.hash, job.cells) for job in other.jobs()]


def test_the_example_of_the_documentation_is_a_suite(tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "background" / "benchmarks.md").read_text()
    example = text.partition("## Grids")[2].partition("```toml\n")[2].partition("```")[0]
    sized = read_suite(written(tmp_path, example)).at("small")
    assert len(list(sized.cells())) == 24
    labels = [row.label for row in sized.rows]
    assert labels[0] == "infonce, temperature=0.1"
    assert len(labels) == 6
    assert {sized.base_of(row) for row in sized.rows} == {None, *labels[:2]}
    assert len({job.hash for job in sized.jobs()}) == 24
