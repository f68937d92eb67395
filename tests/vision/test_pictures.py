"""The picture of a query, and `dipole theory` on a run: weights against a loop, the map, bounds, files, mistakes."""

import json
import math
import re
import sys

import numpy as np
import pytest
import torch

from dipole import objective
from dipole.core.cli import main
from dipole.core.evaluation.theory import pictures
from dipole.core.utils.extras import install_line
from dipole.vision import evaluation
from dipole.vision.pictures import around, flat, neighbourhood
from tests.runs import commanded, run_of
from tests.vision.made import QUICK

SMALL = [*QUICK, "vision.data.limit=64", "train.batch_size=32", "vision.probe.picture=true"]


def test_weights_equal_the_papers_sums():
    """CACR Eqs. 3 and 5 written out, the first of five images with two positives, sharp as the objective is."""
    views = list(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).double())
    found = neighbourhood(views, t_pos=0.7, t_neg=3.0)
    unit = [[row / row.norm() for row in view] for view in views]

    def distance(a, b):
        return float(((a - b) ** 2).sum())

    pull = [math.exp(0.7 * distance(unit[0][0], unit[v][0])) for v in (1, 2)]
    push = [math.exp(-3.0 * distance(unit[0][0], unit[1][j])) for j in range(1, 5)]
    torch.testing.assert_close(found.positives, torch.tensor(pull) / sum(pull))
    torch.testing.assert_close(found.negatives, torch.tensor(push) / sum(push))
    expected = torch.stack([*(view[0] for view in unit), *unit[1][1:]])
    torch.testing.assert_close(found.points, expected.float())
    assert objective("0.5*infonce + cacr(t_pos=2, t_neg=0.9)").sharpness() == (2, 0.9)
    assert objective("infonce").sharpness() == (1.0, 2.0)


def test_a_query_may_have_more_positives_than_it_is_trained_with(tmp_path, monkeypatch):
    """CACR Fig. 7 shows four, also of the encoder that was trained with one."""
    drawn = []
    monkeypatch.setattr(evaluation, "draw_query", lambda views, found, *_, **__: drawn.append((views, found)))
    settings = [*SMALL, "train.epochs=", "train.steps=1", "vision.probe.positives=4", "objective=cacr(k=1, t_neg=3)"]
    run_of("digits-simclr", tmp_path, *settings)
    ((views, found),) = drawn
    assert (len(views), found.positives.shape, found.negatives.shape, found.t_neg) == (5, (4,), (31,), 3)


def test_projections_keep_planes_and_groups_with_the_query_in_the_middle():
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 2, generator=generator))
    points = torch.randn(20, 2, generator=generator) @ basis.T + 3
    torch.testing.assert_close(torch.cdist(*[flat(points, "pca")] * 2), torch.cdist(points, points), atol=1e-4, rtol=0)
    points = torch.randn(60, 5, generator=generator) / 10 + 3 * torch.eye(5)[torch.arange(60) % 3]
    x = flat(points, "tsne")
    nearest = torch.cdist(x, x).fill_diagonal_(math.inf).argmin(1)
    assert torch.equal(nearest % 3, torch.arange(60) % 3)
    points = torch.randn(9, 2, generator=generator) + 5
    moved, reach = around(points, "tsne")
    assert reach == 10  # CACR: samples in [-10, 10] on both axes
    assert moved[0].tolist() == [0, 0]
    torch.testing.assert_close(torch.cdist(moved, moved), torch.cdist(points, points))
    assert around(points, "pca")[1] == pytest.approx(1.05 * float((points - points[0]).abs().max()))


def test_pictures_while_training_and_of_a_finished_run(tmp_path, capsys):
    settings = [*SMALL, "train.epochs=2", "train.evaluate_every=1", "vision.probe.projection=pca", "vision.views=5"]
    run = commanded("digits-simclr", tmp_path / "runs", *settings, "objective=cacr(k=4)")
    assert sorted(path.name for path in (run / "pictures").iterdir()) == ["step-2.png", "step-4.png"]
    assert main(["export", str(run), "--to", "picture", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "query.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((run / "record.json").read_text())["status"] == "done"
    assert main(["export", str(run), "--to", "detectron2", "--out", str(tmp_path / "net")]) == 2
    assert "resnet50" in capsys.readouterr().err


def test_without_matplotlib_a_run_with_pictures_says_so_before_it_trains(tmp_path, monkeypatch, capsys):
    """Without pictures the same run is fine."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["train", "digits-simclr", "--runs", str(tmp_path), "--set", *SMALL, "train.epochs=", "train.steps=1"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert install_line("vision") in said
    assert "Traceback" not in said
    assert main([*command, "vision.probe.picture=false"]) == 0
    assert install_line("vision") not in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    sets = [*QUICK, "train.epochs=1", "train.log_every=1", "vision.data.limit=1024"]
    text = "objective=infonce + 0.1*dp(delta_pos=0.2) + 0.05*cllr(alpha=2)"
    return commanded("digits-simclr", tmp_path_factory.mktemp("runs"), *sets, text)


def theory(run, capsys, *options):
    code = main(["theory", str(run), "--points", "200", "--tasks", "2", "--draws", "1", *options])
    return code, capsys.readouterr()


def test_a_run_as_json_and_as_a_picture(run, capsys, tmp_path, monkeypatch):
    first, second, draw = tmp_path / "one.svg", tmp_path / "two.svg", pictures.draw_report
    twice = lambda report, path, title: [draw(report, each, title) for each in (second, path)]  # noqa: E731
    monkeypatch.setattr(pictures, "draw_report", twice)
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
    assert first.read_bytes() == second.read_bytes()
    axis, legend = (re.findall(rf' y="([\d.]+)".*>{word}', first.read_text())[0] for word in ("update T", "least"))
    assert float(axis) < float(legend)  # the legend is below the axes and covers no curve


def test_other_labels_and_features(run, capsys, tmp_path):
    np.save(tmp_path / "labels.npy", np.arange(180) % 2)
    (tmp_path / "labels.txt").write_text("\n".join("ab"[i % 2] for i in range(180)))
    told = []
    for labels in (tmp_path / "labels.npy", tmp_path / "labels.txt"):
        code, printed = theory(run, capsys, "--labels", str(labels), "--loss", "hinge", "--features", "raw")
        assert code == 0
        told.append(printed.out)
    assert told[0] == told[1]
    assert "2 of 2 classes" in told[0]
    assert "need as many, there are 2" in told[0]  # five classes of k = 4
    code, printed = theory(run, capsys, "--labels", "blocks:20", "--loss", "logistic", "--k", "1")
    assert code == 0
    assert "9 of 9 classes" in printed.out
    assert "is about the hinge loss" in printed.out


@pytest.mark.parametrize(("options", "code", "message"), [
    (["--labels", "blocks:none"], 2, "blocks:N"), (["--labels", "absent.txt"], 1, "cannot read labels"),
    (["--delta-pos", "0.7"], 2, "must be below"), (["--scale", "0"], 2, "scale must be a number > 0"),
])  # fmt: skip
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
