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


def earlier(lines):
    """The lines of runs with dp from before the change."""
    return [line for line in lines if line["record"]["started"] < CHANGE and TERM.search(line["record"]["objective"])]


def test_bare_finds_a_dp_without_a_reduction():
    for text in ("dp", "infonce + 0.1*dp", "infonce + dp(delta_pos=0.2)", "0.1*dp + dp(reduction=mean)"):
        assert BARE.search(text)
    for text in ("dp(delta_pos=0.2, reduction=mean)", "SimCLR+DP", "objective.dpp"):
        assert not BARE.search(text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_earlier_runs_name_their_reduction_and_keep_their_id(path):
    for line in earlier(path_lines := lines_of(path)[1]):
        assert not BARE.search(line["record"]["objective"]), line["run"]
        assert not BARE.search(" ".join(line["command"])), line["run"]
        settings = [value for flag, value in zip(line["command"], line["command"][1:], strict=False) if flag == "--set"]
        assert load(line["command"][1], settings).config.hash == line["run"]
    assert path_lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_with_earlier_runs_name_their_reduction(path):
    suite, lines = lines_of(path)
    used = {row for line in earlier(lines) for row, _, _ in line["cells"]}
    shipped = {row.label: row for row in read_suite(suites()[suite["suite"]]).at(suite["scale"]).rows}
    for number in used:
        kept = suite["rows"][number]
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
        records = [
            train(load("digits-simclr", ["train.epochs=3", f"objective={objective}", f"seed={seed}"]).config, tmp_path)
            for seed in range(3)
        ]
        means[objective] = [
            fmean(record.results["kmeans/accuracy"] for record in records),
            fmean(record.diagnostics["mean_distance"] for record in records),
        ]
    assert means["infonce + 0.1*dp"] == [
        pytest.approx(means["infonce"][0], abs=0.03),
        pytest.approx(means["infonce"][1], abs=0.02),
    ]
