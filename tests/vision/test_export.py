"""An exported encoder gives the same features when transformers loads it back."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dipole.core.cli import main
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds, seed_everything
from dipole.vision.adapter import VisionAdapter
from dipole.vision.config import VisionConfig
from dipole.vision.export import DipoleVisionModel

RECORD = SimpleNamespace(
    name="r", objective="infonce", seed=0, epochs=1.0, results={"linear/accuracy": 0.5}, versions={}, hash="0" * 12
)


@pytest.mark.parametrize(
    "encoder", [{"name": "small-conv", "width": 4}, {"name": "vgg16", "tap": "pooled"}, {"name": "resnet18"}]
)
@pytest.mark.parametrize("method", ["simclr", "moco", "blocks", "swav"])
def test_round_trip(tmp_path, encoder, method):
    if method != "simclr" and encoder["name"] != "small-conv":
        pytest.skip("one encoder suffices for the other methods")
    table = {"method": method, "encoder": {**encoder, "dim": 8}, "augment": {"size": 16}, "data": {"limit": 32}}
    if method == "moco":
        table["negatives"] = 8
    config = VisionConfig.model_validate_json(json.dumps(table))
    seed_everything(1)
    a = VisionAdapter(
        config, seed=Seeds(0), device=torch.device("cpu"), workdir=Path(), batch_size=9 if method == "blocks" else 8
    )
    a.embed(next(iter(a.batches(0))))  # moves the running statistics of batch norm
    a.module.eval()
    a.export("transformers", tmp_path, RECORD)
    loaded = DipoleVisionModel.from_pretrained(tmp_path).eval()
    images = torch.rand(3, 1, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images).pooler_output, a.module.features(images), atol=0, rtol=0)
    card = (tmp_path / "README.md").read_text()
    assert "infonce" in card
    assert a.data_info()["fingerprint"] in card


def test_two_encoders_cannot_be_one_model(tmp_path):
    from dipole.vision.encoders import EncoderConfig, build_encoder
    from dipole.vision.frameworks.base import Branch
    from dipole.vision.frameworks.cmc import CMC

    light, colour = (Branch(build_encoder(EncoderConfig(width=2), channels, 8)) for channels in (1, 2))
    with pytest.raises(ConfigError, match="two encoders"):
        CMC(light, colour).trained_encoder()


# What detectron2's resnet.py builds (BasicStem, BottleneckBlock, BasicBlock), written down from its published code.
DETECTRON2 = {"resnet50": ((3, 4, 6, 3), True), "resnet18": ((2, 2, 2, 2), False)}


def detectron2_shapes(name):
    """Name -> shape of every weight of detectron2's ResNet of depth 50 or 18."""
    depths, bottleneck = DETECTRON2[name]
    shapes = {}

    def conv(at, outputs, inputs, size):
        shapes[f"{at}.weight"] = (outputs, inputs, size, size)
        shapes.update({f"{at}.norm.{part}": (outputs,) for part in ("weight", "bias", "running_mean", "running_var")})

    conv("stem.conv1", 64, 3, 7)
    inputs = 64
    for stage, depth in enumerate(depths, 2):
        narrow = 64 * 2 ** (stage - 2)
        outputs = 4 * narrow if bottleneck else narrow
        for block in range(depth):
            at = f"res{stage}.{block}"
            if inputs != outputs:
                conv(f"{at}.shortcut", outputs, inputs, 1)
            if bottleneck:
                conv(f"{at}.conv1", narrow, inputs, 1)
                conv(f"{at}.conv2", narrow, narrow, 3)
                conv(f"{at}.conv3", outputs, narrow, 1)
            else:
                conv(f"{at}.conv1", outputs, inputs, 3)
                conv(f"{at}.conv2", outputs, outputs, 3)
            inputs = outputs
    return shapes


def detectron2_features(weights, x, name):
    """The pooled output of detectron2's forward pass: stride in the 3x3 convolution, ReLU after the sum."""
    import torch.nn.functional as F

    w = {key: torch.from_numpy(value) for key, value in weights.items()}

    def conv(at, x, stride=1, padding=0):
        x = F.conv2d(x, w[f"{at}.weight"], stride=stride, padding=padding)
        norm = [w[f"{at}.norm.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *norm)

    depths, bottleneck = DETECTRON2[name]
    x = F.max_pool2d(conv("stem.conv1", x, 2, 3).relu(), 3, 2, 1)
    for stage, depth in enumerate(depths, 2):
        for block in range(depth):
            at, stride = f"res{stage}.{block}", 2 if stage > 2 and block == 0 else 1
            short = conv(f"{at}.shortcut", x, stride) if f"{at}.shortcut.weight" in w else x
            if bottleneck:
                y = conv(f"{at}.conv1", x).relu()
                y = conv(f"{at}.conv3", conv(f"{at}.conv2", y, stride, 1).relu())
            else:
                y = conv(f"{at}.conv2", conv(f"{at}.conv1", x, stride, 1).relu(), padding=1)
            x = (y + short).relu()
    return x.mean((2, 3))


@pytest.mark.parametrize("name", DETECTRON2)
def test_detectron2_finds_its_names_shapes_and_features(name, tmp_path):
    import pickle

    import yaml

    from dipole.vision.encoders import EncoderConfig, build_encoder
    from dipole.vision.export.detectron2 import export

    seed_everything(2)
    encoder = build_encoder(EncoderConfig(name=name, stem="imagenet"), 3, 64)
    encoder.set_statistics([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
    encoder(torch.rand(8, 3, 64, 64))  # moves the running statistics
    encoder.eval()
    config = SimpleNamespace(encoder=SimpleNamespace(name=name), method="simclr")
    method = SimpleNamespace(trained_encoder=lambda: encoder)
    export(SimpleNamespace(config=config, module=method, info={}), tmp_path, RECORD, None)
    stored = pickle.loads((tmp_path / "backbone.pkl").read_bytes())
    assert stored["matching_heuristics"]
    assert {key: value.shape for key, value in stored["model"].items()} == detectron2_shapes(name)
    images = torch.rand(2, 3, 64, 64)
    for task, classes in (("voc", 20), ("coco", 80)):
        model = yaml.safe_load((tmp_path / f"{task}.yaml").read_text())["MODEL"]
        assert model["WEIGHTS"] == "backbone.pkl"
        assert model["ROI_HEADS"]["NUM_CLASSES"] == classes
        assert (model["RESNETS"]["DEPTH"], model["RESNETS"]["STRIDE_IN_1X1"]) == (int(name[6:]), False)
    mean, std = (torch.tensor(model[f"PIXEL_{part}"])[:, None, None] for part in ("MEAN", "STD"))
    with torch.no_grad():  # detectron2 sees pixels of 0 to 255
        found = detectron2_features(stored["model"], (255 * images - mean) / std, name)
        torch.testing.assert_close(found, encoder(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("table", "channels", "message"),
    [
        ({"name": "small-conv"}, 3, "vision.encoder.name"),
        ({"name": "resnet18"}, 3, "vision.encoder.stem"),
        ({"name": "resnet18", "stem": "imagenet"}, 1, "1 channel"),
    ],
)
def test_detectron2_has_no_other_backbones(table, channels, message):
    from dipole.vision.encoders import EncoderConfig, build_encoder
    from dipole.vision.export.detectron2 import backbone

    with pytest.raises(ConfigError, match=message):
        backbone(build_encoder(EncoderConfig(**table), channels, 32))


def test_a_run_of_blocks_is_exported_in_every_format(tmp_path):
    """CACR Table 5's supervised row is a ResNet trained on blocks."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "colour.npz", images=pixels, labels=np.arange(40) % 4)
    settings = [
        f"vision.data.source={tmp_path / 'colour.npz'}",
        f"vision.data.test={tmp_path / 'colour.npz'}",
        "vision.encoder.name=resnet18",
        "vision.encoder.stem=imagenet",
        "vision.probe.probes=['knn']",
        "vision.probe.baselines=false",
        "vision.probe.projection=pca",
        "train.batch_size=9",
        "train.epochs=",
        "train.steps=1",
        "objective=cross_entropy(classes=4)",
    ]
    flags = [part for text in settings for part in ("--set", text)]
    assert main(["train", "digits-blocks", "--runs", str(tmp_path / "runs"), *flags]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    for to, file in (("transformers", "model.safetensors"), ("detectron2", "backbone.pkl"), ("picture", "query.png")):
        assert main(["export", str(run), "--to", to, "--out", str(tmp_path / to)]) == 0
        assert (tmp_path / to / file).stat().st_size > 1000
    loaded = DipoleVisionModel.from_pretrained(tmp_path / "transformers").eval()
    assert loaded(torch.rand(2, 3, 16, 16)).pooler_output.shape == (2, 512)
