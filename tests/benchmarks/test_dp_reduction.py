"""Results from before reduction=mean became the default of dp name the sum that they used, and their ids stay."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

import dipole.benchmarks
from dipole.benchmarks.studies import learning_text
from dipole.benchmarks.suite import read_suite, suites
from dipole.core.train.recipe import load
from dipole.core.train.run import train

ROOT = Path(dipole.benchmarks.__file__).parent
CHANGE = "2026-11-25T21:40:00Z"
"""When the default changed. Later records may use the new one without naming it."""
MEASURED_AGAIN = {("learning-everywhere", "dp")}
"""Keys of studies that were measured after the change."""
BARE = re.compile(r"(?<![\w.\-/])dp\b(?!\([^()]*reduction=)")
TERM = re.compile(r"[+*]\s*dp\b|^dp\b")
FILES = sorted((ROOT / "results" / "suites").glob("*.jsonl"))


def lines_of(path):
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return head["suite"], [line for line in lines if "record" in line]


def test_bare_finds_a_dp_without_a_reduction():
    for text in ("dp", "infonce + 0.1*dp", "infonce + dp(delta_pos=0.2)", "0.1*dp + dp(reduction=mean)"):
        assert BARE.search(text)
    for text in ("dp(delta_pos=0.2, reduction=mean)", "SimCLR+DP", "objective.dpp"):
        assert not BARE.search(text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_earlier_runs_and_their_rows_name_their_reduction(path):
    suite, lines = lines_of(path)
    assert lines
    shipped = {row.label: row for row in read_suite(suites()[suite["suite"]]).at(suite["scale"]).rows}
    for line in lines:
        objective = line["record"]["objective"]
        if line["record"]["started"] >= CHANGE or not TERM.search(objective):
            continue
        assert not BARE.search(objective), line["run"]
        assert not BARE.search(" ".join(line["command"])), line["run"]
        for kept in (suite["rows"][number] for number, _, _ in line["cells"]):
            row = shipped[kept["label"]]
            assert row.objective == kept["objective"]
            for text in (row.objective, row.label, row.base or ""):
                assert not (TERM.search(text) and BARE.search(text)), text


def test_studies_name_their_reduction():
    for path in [*(ROOT / "results").glob("*.json"), *(ROOT / "speed" / "results").glob("*.json")]:
        keys = set(re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8")))
        bare = {key for key in keys if BARE.search(key)}
        assert bare <= {key for name, key in MEASURED_AGAIN if name == path.stem}, path.name
    assert not BARE.search(learning_text.TRAINED["QT+DP"])
    rows = read_suite(ROOT / "studies" / "cartpole-balance.toml").at("small").rows
    assert not any(BARE.search(row.objective) for row in rows)


@pytest.mark.slow
def test_polarization_of_the_paper_s_weight_trains_like_infonce(tmp_path):
    """Three epochs of digits: over three seeds within 3 points of k-means accuracy and 0.02 of mean distance."""
    means = {}
    for objective in ("infonce", "infonce + 0.1*dp"):
        runs = (load("digits-simclr", ["train.epochs=3", f"objective={objective}", f"seed={s}"]) for s in range(3))
        records = [train(run.config, tmp_path) for run in runs]
        accuracy = fmean(record.results["kmeans/accuracy"] for record in records)
        means[objective] = accuracy, fmean(record.diagnostics["mean_distance"] for record in records)
    (base, distance), (ours, own) = means.values()
    assert ours == pytest.approx(base, abs=0.03)
    assert own == pytest.approx(distance, abs=0.02)
