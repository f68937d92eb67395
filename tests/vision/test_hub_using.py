"""A run over a model of transformers, after the model it started from and its images are gone."""

import json
import shutil

import numpy as np
import pytest
import torch

from dipole.core.cli import main
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import load_run
from dipole.core.utils.errors import ConfigError
from tests.vision.test_hub_encoders import configs
from tests.vision.test_using import probed, save_images, trained

NOT_THEIRS = ("vision.encoder.width=", "vision.encoder.dim=")  # settings of our own networks


def checkpoint(folder, name):
    from transformers import AutoModel

    torch.manual_seed(4)
    AutoModel.from_config(configs()[name]).save_pretrained(folder)
    return folder


CASES = [
    ("vit", "mean", [], 1e-5),
    ("vit", "cls", ["vision.encoder.lora={rank = 2}"], 1e-5),
    ("convnext", "max", [], 1e-5),
    ("swin", "mean", [], 1e-5),
    ("vit", "mean", ["vision.augment.size=24"], 0.01),  # resized as bytes
]


@pytest.mark.parametrize(
    ("name", "pooling", "more", "near"),
    [pytest.param(*case, marks=[] if case[0] == "convnext" else pytest.mark.slow) for case in CASES],
)
def test_every_folder_gives_the_features_of_the_run(tmp_path, name, pooling, more, near):
    source = checkpoint(tmp_path / "model", name)
    settings = [f"vision.encoder.name=hub:{source}", f"vision.encoder.pooling={pooling}"]
    run = trained(tmp_path / "there", *settings, *NOT_THEIRS, *more)
    features, images, _ = probed(run)
    inputs = save_images(tmp_path / "inputs", images)
    moved = shutil.move(run, tmp_path / "elsewhere")
    for gone in ("there", "model"):
        shutil.rmtree(tmp_path / gone)

    def embedded(folder):
        out = tmp_path / "f.npy"
        assert main(["embed", str(folder), inputs, "-o", str(out), "--quiet"]) == 0
        return np.load(out)

    assert np.array_equal(embedded(moved), features.numpy())
    for to in ("transformers", "onnx"):
        assert main(["export", str(moved), "--to", to, "--out", str(tmp_path / to)]) == 0
        assert embedded(tmp_path / to) == pytest.approx(features.numpy(), abs=near)
    card = (tmp_path / "transformers" / "README.md").read_text()
    assert {"mean": ".mean(", "cls": "[:, 0]", "max": ".amax("}[pooling] in card  # what the run's features are
    assert json.loads((tmp_path / "transformers" / "config.json").read_text())["model_type"] == name


def test_what_has_no_such_folder_is_refused(tmp_path):
    source = checkpoint(tmp_path / "model", "vit")
    settings = [f"vision.encoder.name=hub:{source}", "vision.encoder.tap=layer1"]
    run = trained(tmp_path / "there", *settings, *NOT_THEIRS)
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    for to, said in (("transformers", "ends with 'layer1'; choose --to onnx"), ("timm", "no network like a ViTModel")):
        with pytest.raises(ConfigError, match=said):
            adapter.export(to, tmp_path, None)
