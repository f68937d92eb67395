"""Exported folders give the features of the run in the libraries that load them, or leave nothing behind."""

import errno
import json
import os
import pickle
import re
import sqlite3
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from dipole.core.cli import main
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import disk_error
from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.encoders.base import Stages
from dipole.vision.export import DipoleVisionModel, detectron2
from dipole.vision.export.timm import timm_weights
from dipole.vision.export.transformers import describe
from dipole.vision.exported import open_folder
from dipole.vision.frameworks.base import Branch
from dipole.vision.frameworks.cmc import CMC
from dipole.vision.modeling_dipole_vision import build
from tests.runs import Record, commanded, refused
from tests.systems import file_limit, posix
from tests.vision.made import CPU, ONE_STEP, colour_file, make_adapter
from tests.without_dipole import WITHOUT_DIPOLE

ENCODERS = {
    "small-conv": {"name": "small-conv", "width": 4}, "alexnet at fc6": {"name": "alexnet", "tap": "fc6"},
    "linear": {"name": "linear", "width": 4}, "resnet18, small stem": {"name": "resnet18"},
    "resnet18": {"name": "resnet18", "stem": "imagenet"},
}  # fmt: skip
PLAIN = {"resnet18"}


def built(encoder, workdir, **table):
    values = {"encoder": {**encoder, "dim": 8}, "augment": {"size": 32}} | table
    adapter = make_adapter(values, 8, weights=1, workdir=workdir)
    adapter.embed(next(iter(adapter.batches(0))))  # moves the running statistics of batch norm
    adapter.module.eval()
    return adapter


def colour(tmp_path):
    return {"data": {"source": colour_file(tmp_path, 32, 40)["source"], "limit": 16}}


RECORD = Record(results={"linear/accuracy": 0.5, "lost": None})
ALONE = """
import numpy, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel
given, picture = json.loads(sys.argv[1])
for folder, code in given:
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, **({"trust_remote_code": True} if code else {})).eval()
    with torch.no_grad():
        pixels = processor(Image.open(picture), return_tensors="pt")
        numpy.save(folder + ".npy", model(**pixels).pooler_output.flatten(1).numpy())
"""


@pytest.mark.slow
def test_transformers_loads_the_folders_without_dipole(tmp_path):
    table = colour(tmp_path)
    adapters = {name: built(encoder, tmp_path, **table) for name, encoder in ENCODERS.items()}
    for name in (*ENCODERS, "hub linear", "hub resnet18, small stem"):  # an exported folder is the encoder of a run
        if name.startswith("hub "):
            folder = tmp_path / name.removeprefix("hub ")
            adapters[name] = built({"name": f"hub:{folder}", "freeze": "backbone"}, tmp_path, **table)
        (tmp_path / name).mkdir()
        adapters[name].export("transformers", tmp_path / name, RECORD)
        assert any((tmp_path / name).glob("*.py")) == (name not in PLAIN)
    assert json.loads((tmp_path / "resnet18" / "config.json").read_text())["model_type"] == "resnet"
    image = next(iter(adapters.values())).parts.test.images[:1]
    Image.fromarray(image[0].permute(1, 2, 0).numpy()).save(tmp_path / "one.png")
    given = json.dumps([[[str(tmp_path / name), name not in PLAIN] for name in adapters], str(tmp_path / "one.png")])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_DIPOLE + ALONE, given]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for name, adapter in adapters.items():
        with torch.no_grad():
            wanted = adapter.module.features(image / 255)
        found = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5, msg=name)
        found = DipoleVisionModel.from_pretrained(tmp_path / name)(image / 255).pooler_output
        torch.testing.assert_close(found, wanted)
        if name.startswith("hub "):
            with torch.no_grad():
                first = adapters[name.removeprefix("hub ")].module.features(image / 255)
            torch.testing.assert_close(wanted, first, atol=1e-6, rtol=1e-5)


def network(channels=3, **settings):
    return build_encoder(EncoderConfig(**settings), channels, 32)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: describe(Stages(3, {"all": nn.Bilinear(3, 3, 3)}, {"all": 3})), "layer Bilinear.*Known layers: Conv2d"),
    (lambda: timm_weights(network(name="small-conv")), "timm has no network like"),
    (lambda: timm_weights(network(name="resnet18")), "timm has no network like"),
    (CMC(Branch(network(1, width=2)), None, colour=Branch(network(2, width=2))).trained_encoder, "two encoders"),
    (lambda: detectron2.backbone(network(name="small-conv")), "vision.encoder.name"),
    (lambda: detectron2.backbone(network(name="resnet18")), "vision.encoder.stem"),
    (lambda: detectron2.backbone(network(1, name="resnet18", stem="imagenet")), "1 channel"),
])  # fmt: skip
def test_what_no_format_can_hold_is_refused(call, message):
    refused(ConfigError, message, call)


def test_all_arguments_of_a_layer_are_exported():
    images = torch.rand(2, 3, 8, 8)
    for layer in (nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(3, affine=False)):
        again = build(json.loads(json.dumps(describe(Stages(3, {"all": layer}, {"all": 3}))))[0][1]).eval()
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again(images), layer.eval()(images))


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "table"), [
    ({"name": "resnet18", "stem": "imagenet"}, {}),
    ({"name": "small-conv", "width": 4}, {"method": "cmc", "negatives": 8}),
])  # fmt: skip
def test_onnx_gives_the_same_features(tmp_path, encoder, table):
    adapter = built(encoder, tmp_path, **colour(tmp_path), **table)
    images = adapter.parts.test.images[:6]
    with torch.no_grad():
        wanted = adapter.module.features(images / 255)
    found = open_folder(exported(adapter, "onnx", tmp_path), CPU, None).vectors(list(images))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def exported(adapter, to, tmp_path):
    out = tmp_path / "out"
    out.mkdir(parents=True)
    adapter.export(to, out, RECORD)
    return out


NETWORKS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}
"""Depths of the stages of torchvision's ResNets, and whether they have bottlenecks, from their published code."""


class Block(nn.Module):
    """A block of a ResNet: stride in the 3x3 convolution, ReLU after the sum."""

    def __init__(self, inputs, width, outputs, stride):
        super().__init__()
        layers = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if outputs > width:
            layers = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.places = range(1, len(layers) + 1)
        for place, (before, after, size, step) in zip(self.places, layers, strict=True):
            self.add_module(f"conv{place}", nn.Conv2d(before, after, size, step, size // 2, bias=False))
            self.add_module(f"bn{place}", nn.BatchNorm2d(after))
        self.downsample = nn.Identity()
        if inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn1(self.conv1(x))
        for place in self.places[1:]:
            y = self.get_submodule(f"bn{place}")(self.get_submodule(f"conv{place}")(y.relu()))
        return (y + self.downsample(x)).relu()


def resnet(name):
    """A ResNet without its classifier under torchvision's names, which timm shares."""
    depths, is_bottleneck = NETWORKS[name]
    layers = {"conv1": nn.Conv2d(3, 64, 7, 2, 3, bias=False), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU()}
    layers["maxpool"] = nn.MaxPool2d(3, 2, 1)
    inputs = 64
    for stage, depth in enumerate(depths):
        width, blocks = 64 * 2**stage, []
        for block in range(depth):
            outputs = 4 * width if is_bottleneck else width
            blocks.append(Block(inputs, width, outputs, 2 if stage and not block else 1))
            inputs = outputs
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    return nn.Sequential(OrderedDict(layers, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())).eval()


def of_detectron2(name):
    """The name that detectron2's resnet.py gives a tensor of torchvision's."""
    name = re.sub(r"layer(\d)", lambda found: f"res{int(found[1]) + 1}", name)
    name = re.sub(r"bn(\d)", r"conv\1.norm", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    return name if name.startswith("res") else f"stem.{name}"


@pytest.mark.parametrize("name", NETWORKS)
def test_timm_and_detectron2_find_their_names_shapes_and_features(name, tmp_path):
    adapter = built({"name": name, "stem": "imagenet"}, tmp_path, **colour(tmp_path))
    encoder, network, images = adapter.module.trained_encoder(), resnet(name), torch.rand(2, 3, 64, 64)
    encoder.set_statistics([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
    with torch.no_grad():
        expected = adapter.module.features(images)
    out = exported(adapter, "timm", tmp_path / "timm")
    network.load_state_dict(load_file(out / "model.safetensors"))
    config = json.loads((out / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == (name, 0)
    mean, std = (torch.tensor(config["pretrained_cfg"][part])[:, None, None] for part in ("mean", "std"))
    with torch.no_grad():
        torch.testing.assert_close(network((images - mean) / std), expected, atol=1e-4, rtol=1e-4)
    out, network = exported(adapter, "detectron2", tmp_path), resnet(name)
    stored = pickle.loads((out / "backbone.pkl").read_bytes())
    assert stored["matching_heuristics"]
    names = {of_detectron2(key): key for key, value in network.state_dict().items() if value.ndim}
    assert stored["model"].keys() == names.keys()
    weights = {names[key]: torch.from_numpy(value) for key, value in stored["model"].items()}
    network.load_state_dict(weights, strict=False)  # shapes are checked, batches were not counted
    for task, classes in (("voc", 20), ("coco", 80)):
        model = yaml.safe_load((out / f"{task}.yaml").read_text())["MODEL"]
        assert (model["WEIGHTS"], model["ROI_HEADS"]["NUM_CLASSES"]) == ("backbone.pkl", classes)
        assert (model["RESNETS"]["DEPTH"], model["RESNETS"]["STRIDE_IN_1X1"]) == (int(name[6:]), False)
    mean, std = (torch.tensor(model[f"PIXEL_{part}"])[:, None, None] for part in ("MEAN", "STD"))
    with torch.no_grad():  # detectron2 sees pixels of 0 to 255
        torch.testing.assert_close(network((255 * images - mean) / std), expected, atol=1e-4, rtol=1e-4)


def test_a_run_of_blocks_is_exported_in_every_format_with_a_card_that_the_hub_reads(tmp_path):
    """CACR Table 5's supervised row is a ResNet trained on blocks."""
    settings = ["encoder.name=resnet18", "encoder.stem=imagenet", "probe.probes=['knn']", "probe.baselines=false"]
    settings += ["probe.projection=pca", *(f"data.{key}={file}" for key, file in colour_file(tmp_path, 16, 40).items())]
    settings = [f"vision.{each}" for each in settings] + ["objective=cross_entropy(classes=4) + 0.1*dp"]
    settings += ["train.batch_size=9", "train.epochs=", "train.steps=1"]
    run = commanded("digits-blocks", tmp_path / "runs", *settings)
    record = json.loads((run / "record.json").read_text())
    formats = {"transformers": "model.safetensors", "timm": "model.safetensors", "detectron2": "backbone.pkl"}
    for to, file in (formats | {"picture": "query.png"}).items():
        assert main(["export", str(run), "--to", to, "--out", str(tmp_path / to)]) == 0
        assert (tmp_path / to / file).stat().st_size > 1000
        card = ModelCard.load(tmp_path / to / "README.md")
        assert (card.data.license, "dipole" in card.data.tags) == ("unknown", True)
        values = {result.metric_name: result.metric_value for result in card.data.eval_results}
        assert values["knn/accuracy"] == pytest.approx(record["results"]["knn/accuracy"])
        assert "0.1 x `dp`" in card.text
        assert record["data"]["fingerprint"] in card.text
    loaded = DipoleVisionModel.from_pretrained(tmp_path / "transformers").eval()
    assert loaded(torch.rand(2, 3, 16, 16)).pooler_output.shape == (2, 512)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return str(commanded("digits-simclr", tmp_path_factory.mktemp("runs"), *ONE_STEP, "train.batch_size=8"))


@posix
@pytest.mark.parametrize(
    ("to", "limit", "there"), [("onnx", 2000, False), ("transformers", 2000, True), ("transformers", 300, False)]
)
def test_a_full_disk_is_the_reason_and_nothing_is_left(trained, tmp_path, capfd, to, limit, there):
    out = tmp_path / "out"
    if there:
        (out / ".export.0123abcd.tmp").mkdir(parents=True)  # of a killed export
    with file_limit(limit):
        assert main(["export", trained, "--to", to, "--out", str(out)]) == 1
    said = capfd.readouterr().err
    assert f"cannot export to {out}: File too large. The file size limit is reached" in said
    assert out.exists() == there
    with pytest.raises(sqlite3.OperationalError) as found:
        sqlite3.connect(":memory:").executescript("PRAGMA max_page_count = 1; CREATE TABLE trials (number);")
    assert disk_error(found.value).errno == errno.ENOSPC
    assert disk_error(ValueError("os error is not meant")) is disk_error(FileNotFoundError(2, "No such file")) is None
    if (to, limit) == ("transformers", 300):
        assert main(["export", trained, "--to", "timm", "--out", str(out)]) == 2  # nor of a format that does not fit
        assert not out.exists()
        assert main(["export", trained, "--to", to, "--out", str(out), "--license", "mit"]) == 0
        assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in out.iterdir()}
        assert not [path for path in out.iterdir() if path.name.endswith(".tmp")]
