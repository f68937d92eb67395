"""The line that installs what is missing."""

import json
import sys
from pathlib import Path

import pytest

from dipole.core.cli import main
from dipole.core.ground.extras import install_line


def installed(folder: Path, origin: dict | None) -> None:
    info = folder / "assay-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: assay\nVersion: 1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'assay[board]'"),
        ({"url": "file:///a/wheel.whl", "archive_info": {}}, "pip install 'assay[board]'"),
        ({"url": "file:///my%20work/assay", "dir_info": {"editable": True}}, "pip install -e '/my work/assay[board]'"),
    ],
)
def test_the_line_is_right_for_a_checkout_and_for_an_index(tmp_path, monkeypatch, origin, line):
    installed(tmp_path, origin)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_line("board", "assay") == line


def test_without_an_extra_and_for_what_is_not_installed():
    assert install_line(package="absent-package") == "pip install absent-package"


RUN = [
    "train.epochs=", "train.steps=1", "train.warmup=0", "train.batch_size=16", "vision.data.limit=32",
    "vision.probe.probes=['knn']", "vision.probe.baselines=false",
]  # fmt: skip
NEEDS = {
    "optuna": (
        ["sweep", "digits-simclr", "--space", "train.learning_rate=log(1e-4, 1e-2)", "--metric", "knn/accuracy"],
        "sweep",
    ),
    "submitit": (["bench", "demo", "--engine", "slurm"], "slurm"),
    "ray": (["bench", "demo", "--engine", "ray"], "ray"),
    "wandb": (["train", "digits-simclr", "--log", "wandb", "--set", *RUN], "wandb"),
    "mlflow": (["train", "digits-simclr", "--log", "mlflow", "--set", *RUN], "mlflow"),
    "trackio": (["train", "digits-simclr", "--log", "trackio", "--set", *RUN], "trackio"),
    "tensorboard": (["train", "digits-simclr", "--log", "tensorboard", "--set", *RUN], "tensorboard"),
    "jinja2": (["report", "RUNS", "-o", "report.html"], "report"),
    "onnx": (["export", "RUN", "--to", "onnx", "--out", "OUT"], "onnx"),
    "onnxscript": (["export", "RUN", "--to", "onnx", "--out", "OUT"], "onnx"),
    "onnxruntime": (["export", "RUN", "--to", "onnx", "--out", "OUT"], "onnx"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    assert main(["train", "digits-simclr", "--quiet", "--runs", str(runs), "--set", *RUN]) == 0
    return next(path for path in runs.iterdir() if path.is_dir() and not path.name.startswith("."))


@pytest.mark.parametrize("package", NEEDS)
def test_what_is_missing_is_one_message_before_any_work(package, trained, tmp_path, monkeypatch, capsys):
    command, extra = NEEDS[package]
    monkeypatch.chdir(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    places = {"RUNS": str(trained.parent), "RUN": str(trained), "OUT": str(tmp_path / "out")}
    capsys.readouterr()
    code = main([places.get(word, word) for word in command])
    said = capsys.readouterr().err
    assert code != 0
    assert f"[{extra}]'" in said
    assert "pip install" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
