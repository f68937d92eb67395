"""`dipole theory`: a run of the digits, its picture, and what is said where something is missing."""

import json

import numpy as np
import pytest

from dipole.core.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sets = ["train.epochs=1", "train.log_every=1", 'vision.probe.probes=["knn"]', "vision.probe.baselines=false"]
    text = "objective=infonce + 0.1*dp(delta_pos=0.2) + 0.05*cllr(alpha=2)"
    assert main(["train", "digits-simclr", "--runs", str(folder), "--set", *sets, text]) == 0
    return next(path for path in folder.iterdir() if (path / "record.json").exists())


def theory(run, capsys, *options):
    code = main(["theory", str(run), "--points", "200", "--tasks", "3", "--draws", "2", *options])
    return code, capsys.readouterr()


def test_a_run_as_json_and_as_a_picture(run, capsys, tmp_path):
    first, second = tmp_path / "one.svg", tmp_path / "two.svg"
    code, printed = theory(run, capsys, "--json", "--picture", str(first))
    found = json.loads(printed.out)
    assert code == 0
    assert all(each["holds"] for each in found["inequalities"] if each["always"])
    keys = {each["key"] for each in found["inequalities"]}
    assert keys >= {"lemma_4_3", "theorem_6_1", "proposition_6_2", "lmcl_theorem_3", "lmcl_theorem_4", "cllr_theorem_2"}
    assert found["missing"] == {}
    assert found["quantities"]["R"]["value"] == pytest.approx(1)  # every similarity is a cosine: the unit sphere
    assert 0.2 in found["curves"]["lmcl_theorem_3"]["delta_pos"]  # the run's own margin
    (bound,) = [each for each in found["inequalities"] if each["key"] == "cllr_theorem_3"]
    assert bound["sides"][0]["value"] == pytest.approx(2 * 0.05)
    assert len(found["curves"]["cllr_theorem_2"]["step"]) == 4
    assert theory(run, capsys, "--json", "--picture", str(second))[0] == 0
    assert first.read_bytes() == second.read_bytes()


def test_other_labels_and_features(run, capsys, tmp_path):
    np.save(tmp_path / "labels.npy", np.arange(719) % 2)
    (tmp_path / "labels.txt").write_text("\n".join("ab"[i % 2] for i in range(719)))
    told = []
    for labels in (tmp_path / "labels.npy", tmp_path / "labels.txt"):
        code, printed = theory(run, capsys, "--labels", str(labels), "--loss", "hinge", "--features", "raw")
        assert code == 0
        told.append(printed.out)
    assert told[0] == told[1]
    assert "2 of 2 classes" in told[0]
    assert "need as many, there are 2" in told[0]  # five classes of k = 4
    code, printed = theory(run, capsys, "--labels", "blocks:100", "--loss", "logistic", "--k", "1")
    assert code == 0
    assert "8 of 8 classes" in printed.out
    assert "is about the hinge loss" in printed.out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--labels", "blocks:none"], 2, "blocks:N"),
        (["--labels", "absent.txt"], 1, "cannot read labels"),
        (["--k", "0"], 2, "k must be an integer >= 1"),
        (["--delta", "2"], 2, "must be between 0 and 1"),
        (["--delta-pos", "0.7"], 2, "must be below"),
        (["--scale", "0"], 2, "scale must be above 0"),
        (["--picture", "a.bmp"], 2, "a picture ends in"),
    ],
)
def test_mistakes(run, capsys, options, code, message):
    got, printed = theory(run, capsys, *options)
    assert got == code
    assert message in printed.err


def test_without_a_run(capsys, tmp_path):
    assert main(["theory"]) == 2
    assert "give a RUN" in capsys.readouterr().err
    assert main(["theory", "--list"]) == 0
    assert "Proposition 6.2" in capsys.readouterr().out
    assert main(["theory", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 10
    assert main(["theory", "--figure1", str(tmp_path / "figure1.png")]) == 0
    assert (tmp_path / "figure1.png").stat().st_size > 10_000
