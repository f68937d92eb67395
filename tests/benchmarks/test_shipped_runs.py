"""Runs of the shipped results repeat. A change that alters the numbers of a run leaves its name as it is."""

import pytest

import dipole
from dipole.benchmarks.results_file import SHIPPED, read_curves, read_results_file, results_files, stored_overrides
from dipole.benchmarks.suite import read_suite

LOSS = "train/loss"
TOLERANCE = 1e-3  # of the losses of the first steps, and of probes without training: other processors round otherwise


@pytest.fixture(scope="module")
def shipped():
    """Return the results file and the shortest run of each recipe, with a curve of losses and without training."""
    runs = [(path, run) for path in results_files(SHIPPED) for run in read_results_file(path).runs.values()]
    runs.sort(key=lambda each: -each[1].record.wall_seconds)
    return {(run.record.name, LOSS in run.curves, run.record.objective == "none"): (path, run) for path, run in runs}


@pytest.mark.parametrize(("recipe", "trains"), [
    ("gaussian-classes", False), ("lmcl-toy", False), ("digits-simclr", True), ("pydoc-blocks", True),
    *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("lmcl-toy", "pydoc-bow")),
])  # fmt: skip
def test_a_run_begins_as_it_did(recipe, trains, shipped, tmp_path):
    path, run = shipped[recipe, trains, not trains]
    manifest = read_results_file(path).manifest
    changed = stored_overrides([path]).get((manifest.suite, manifest.scale), [])
    jobs = {job.hash: job for job in read_suite(manifest.suite).at(manifest.scale, changed).jobs()}
    found = dipole.train(jobs[run.record.hash].config, tmp_path)
    if found.data != run.record.data:
        pytest.skip(f"{recipe}: the data are of another version of Python or of a package")
    if trains:
        (metrics,) = tmp_path.glob("*/metrics.jsonl")
        assert read_curves(metrics, [LOSS])[LOSS].values[0] == pytest.approx(run.curves[LOSS].values[0], rel=TOLERANCE)
    else:
        assert found.results == pytest.approx(run.record.results, abs=TOLERANCE)
