"""A trained vision model without its images: embedding, and folders that other libraries load."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dipole.core.cli import main
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import evaluate_run, load_run
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, OptionError
from dipole.core.utils.seeding import Seeds, seed_everything
from dipole.vision.adapter import VisionAdapter
from dipole.vision.config import VisionConfig
from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.export import DipoleVisionModel
from dipole.vision.exported import open_folder
from dipole.vision.inference import read_images
from tests.without_dipole import WITHOUT_DIPOLE

CPU = torch.device("cpu")


def write_images(folder, classes=3, each=14, side=16):
    draw = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
            pixels[:, :, label] //= 4
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number:02}.png")
    return folder


def trained(folder, *settings, method="simclr"):
    """A run of two steps on images of its own, and its folder."""
    images = write_images(folder / "images")
    flags = [
        f"vision.data.source={images}", f"vision.method={method}", "vision.encoder.width=4", "vision.encoder.dim=8",
        "vision.augment.size=16", "vision.probe.probes=['knn']", "vision.probe.neighbours=2", "train.batch_size=9",
        "train.epochs=", "train.steps=2", *settings,
    ]  # fmt: skip
    if method != "simclr":
        flags.append("vision.views=")
    runs = folder / "runs"
    assert main(["train", "digits-simclr", "--runs", str(runs), "--quiet", "--set", *flags]) == 0
    (run,) = (path for path in runs.iterdir() if path.is_dir())
    return run


def probed(run):
    """Test features as the run's probes see them, and the test images."""
    _, adapter, objective = load_run(RunFolder(run), "cpu")
    adapter.module.eval()
    features = adapter.evaluation.extract(adapter.module, adapter.module.features, adapter.parts.test.images)
    return features, adapter.parts.test.images, objective


@pytest.mark.parametrize("method", ["simclr", "moco", "swav", "cmc"])
def test_a_run_folder_needs_nothing_beside_itself(tmp_path, method):
    settings = ["vision.negatives=9"] if method in ("moco", "cmc") else []
    run = trained(tmp_path / "there", *settings, method=method)
    features, images, _ = probed(run)
    results = RunFolder(run).read_record().results
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(inputs / f"{number:03}.png")
    moved, data = tmp_path / "elsewhere", tmp_path / "data"
    shutil.move(run, moved)
    shutil.move(tmp_path / "there" / "images", data)
    shutil.rmtree(tmp_path / "there")
    out = tmp_path / "f.npy"
    assert main(["embed", str(moved), str(inputs), "-o", str(out), "--quiet"]) == 0
    assert np.array_equal(np.load(out), features.numpy())  # the bits that the probes see
    assert json.loads((tmp_path / "f.ids.json").read_text()) == [f"{n:03}.png" for n in range(len(images))]
    if method == "cmc":
        with pytest.raises(ConfigError, match="two encoders"):
            load_run(RunFolder(moved), "cpu")[1].export("transformers", tmp_path, None)
    else:
        assert main(["export", str(moved), "--to", "transformers", "--out", str(tmp_path / "out")]) == 0
        found = open_folder(tmp_path / "out", CPU, None).vectors(list(images))
        torch.testing.assert_close(found, features, atol=1e-6, rtol=1e-5)
    with pytest.raises(DataError, match=r"(?s)model itself is whole.*vision\.data"):
        evaluate_run(RunFolder(moved), "cpu")
    record, found = evaluate_run(RunFolder(moved), "cpu", [f"vision.data.source={data}"])
    assert record.evaluations[-1].agrees
    assert found.results == results  # baselines of the untrained network included


def test_the_embedding_is_what_the_objective_sees(tmp_path):
    run = trained(tmp_path, "objective=infonce + 0.1*cllr")
    _, adapter, objective = load_run(RunFolder(run), "cpu")
    adapter.module.eval()
    images = adapter.parts.test.images
    embedder = adapter.embedder("embedding", objective)
    wanted = objective.transform(adapter.features("test")[0]).detach()
    assert torch.equal(embedder.vectors(list(images)), wanted)
    with pytest.raises(OptionError, match="Allowed: encoder, embedding"):
        adapter.embedder("head", objective)


def test_images_of_any_size_stay_in_order(tmp_path):
    run = trained(tmp_path)
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    embedder = adapter.embedder()
    draw = torch.Generator().manual_seed(0)
    shapes = [(16, 16), (40, 24), (16, 16), (17, 31), (40, 24)]
    rows = [torch.randint(0, 256, (3, *shape), generator=draw, dtype=torch.uint8) for shape in shapes]
    one_by_one = torch.cat([embedder.vectors([row]) for row in rows])
    torch.testing.assert_close(embedder.vectors(rows), one_by_one, atol=1e-5, rtol=1e-5)


def test_grey_runs_read_grey_levels(tmp_path):
    settings = ["train.epochs=", "train.steps=1", "vision.encoder.width=2", "vision.probe.probes=['knn']"]
    assert main(["train", "digits-simclr", "--runs", str(tmp_path / "runs"), "--quiet", "--set", *settings]) == 0
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    features, images, _ = probed(run)
    (tmp_path / "inputs").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(tmp_path / "inputs" / f"{number:03}.png")
    out = tmp_path / "f.parquet"
    assert main(["embed", str(run), str(tmp_path / "inputs"), "-o", str(out), "--quiet"]) == 0
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(out)
    assert table.column_names == ["path", "features"]
    assert np.array_equal(np.array(table["features"].to_pylist(), dtype=np.float32), features.numpy())


def test_what_is_no_image_is_refused(tmp_path):
    with pytest.raises(DataError, match="neither an image nor a folder"):
        read_images(str(tmp_path / "nothing"), None, None, 3)
    with pytest.raises(DataError, match="holds no images"):
        read_images(str(tmp_path), None, None, 3)
    with pytest.raises(OptionError, match="no columns"):
        read_images(str(tmp_path), "text", None, 3)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"a\.png cannot be decoded"):
        list(read_images(str(tmp_path), None, None, 3).rows)


def test_a_damaged_folder_is_said_to_be(tmp_path):
    run = trained(tmp_path)
    (RunFolder(run).kept / "vision.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        load_run(RunFolder(run), "cpu")


def test_a_model_without_its_kept_files_is_refused(tmp_path):
    run = trained(tmp_path)
    shutil.rmtree(RunFolder(run).kept)
    with pytest.raises(CheckpointError, match=r"the model is incomplete: .*kept is missing"):
        load_run(RunFolder(run), "cpu")


# Exports --------------------------------------------------------------------------------------------------------------

ENCODERS = {
    "small-conv": {"name": "small-conv", "width": 4},
    "alexnet at fc6": {"name": "alexnet", "tap": "fc6"},
    "linear": {"name": "linear", "width": 4},
    "resnet18, small stem": {"name": "resnet18"},
    "resnet18": {"name": "resnet18", "stem": "imagenet"},
}
PLAIN = {"resnet18"}


def make_adapter(encoder, workdir, **table):
    values = {"encoder": {**encoder, "dim": 8}, "augment": {"size": 32}, "data": {"limit": 24}} | table
    seed_everything(1)
    adapter = VisionAdapter(
        VisionConfig.model_validate_json(json.dumps(values)), seed=Seeds(0), device=CPU, workdir=workdir, batch_size=8
    )
    adapter.embed(next(iter(adapter.batches(0))))  # moves the running statistics of batch norm
    adapter.module.eval()
    return adapter


def colour(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "colour.npz", images=pixels, labels=np.arange(40) % 4)
    return {"data": {"source": str(tmp_path / "colour.npz"), "limit": 16}}


def record(**changes):
    values = {
        "name": "tiny", "objective": "infonce(temperature=0.2) + 0.1*dp", "seed": 0, "epochs": 1.0, "hash": "0" * 12,
        "results": {"linear/accuracy": 0.5, "lost": None}, "versions": {},
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


ALONE = (
    WITHOUT_DIPOLE
    + """
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
)


def test_transformers_loads_the_folders_without_dipole(tmp_path):
    table = colour(tmp_path)
    adapters = {name: make_adapter(encoder, tmp_path, **table) for name, encoder in ENCODERS.items()}
    for name, adapter in adapters.items():
        (tmp_path / name).mkdir()
        adapter.export("transformers", tmp_path / name, record())
        assert any((tmp_path / name).glob("*.py")) == (name not in PLAIN)
    assert json.loads((tmp_path / "resnet18" / "config.json").read_text())["model_type"] == "resnet"
    image = next(iter(adapters.values())).parts.test.images[:1]
    Image.fromarray(image[0].permute(1, 2, 0).numpy()).save(tmp_path / "one.png")
    given = json.dumps([[[str(tmp_path / name), name not in PLAIN] for name in adapters], str(tmp_path / "one.png")])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", ALONE, given], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for name, adapter in adapters.items():
        with torch.no_grad():
            wanted = adapter.module.features(image / 255)
        found = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5, msg=name)
        torch.testing.assert_close(
            DipoleVisionModel.from_pretrained(tmp_path / name)(image / 255).pooler_output, wanted
        )


def test_a_layer_without_a_description_is_named(tmp_path):
    from dipole.vision.encoders.base import Stages
    from dipole.vision.export.transformers import describe

    class Twice(torch.nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"layer Twice.*Known layers: Conv2d"):
        describe(Stages(3, {"all": torch.nn.Sequential(Twice())}, {"all": 3}))


@pytest.mark.parametrize(
    ("encoder", "table"),
    [
        ({"name": "resnet18", "stem": "imagenet"}, {}),
        pytest.param({"name": "small-conv", "width": 4}, {"method": "cmc", "negatives": 8}, marks=pytest.mark.slow),
    ],
)
def test_onnx_gives_the_same_features(tmp_path, encoder, table):
    adapter = make_adapter(encoder, tmp_path, **colour(tmp_path), **table)
    out = tmp_path / "out"
    out.mkdir()
    adapter.export("onnx", out, record())
    images = adapter.parts.test.images[:6]
    with torch.no_grad():
        wanted = adapter.module.features(images / 255)
    torch.testing.assert_close(open_folder(out, CPU, None).vectors(list(images)), wanted, atol=1e-4, rtol=1e-4)


def timm_shapes(name):
    """Name -> shape of every weight of timm's (and torchvision's) resnet18 or resnet50 without its classifier."""
    depths, bottleneck = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}[name]
    shapes = {}

    def conv(at, norm, outputs, inputs, size):
        shapes[f"{at}.weight"] = (outputs, inputs, size, size)
        shapes.update({f"{norm}.{part}": (outputs,) for part in ("weight", "bias", "running_mean", "running_var")})
        shapes[f"{norm}.num_batches_tracked"] = ()

    conv("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage, depth in enumerate(depths, 1):
        narrow = 64 * 2 ** (stage - 1)
        outputs = 4 * narrow if bottleneck else narrow
        for block in range(depth):
            at = f"layer{stage}.{block}"
            sizes = [(narrow, inputs, 1), (narrow, narrow, 3), (outputs, narrow, 1)]
            for place, size in enumerate(sizes if bottleneck else [(outputs, inputs, 3), (outputs, outputs, 3)], 1):
                conv(f"{at}.conv{place}", f"{at}.bn{place}", *size)
            if inputs != outputs:
                conv(f"{at}.downsample.0", f"{at}.downsample.1", outputs, inputs, 1)
            inputs = outputs
    return shapes


def timm_features(w, x, name):
    """The pooled output of timm's ResNet: stride in the 3x3 convolution, ReLU after the sum."""
    import torch.nn.functional as F

    def conv(at, norm, x, stride=1, padding=0):
        x = F.conv2d(x, w[f"{at}.weight"], stride=stride, padding=padding)
        return F.batch_norm(x, *(w[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))

    x = F.max_pool2d(conv("conv1", "bn1", x, 2, 3).relu(), 3, 2, 1)
    for stage, depth in enumerate({"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}[name], 1):
        for block in range(depth):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            short = x
            if f"{at}.downsample.0.weight" in w:
                short = conv(f"{at}.downsample.0", f"{at}.downsample.1", x, stride)
            if name == "resnet50":
                y = conv(f"{at}.conv1", f"{at}.bn1", x).relu()
                y = conv(f"{at}.conv2", f"{at}.bn2", y, stride, 1).relu()
                y = conv(f"{at}.conv3", f"{at}.bn3", y)
            else:
                y = conv(f"{at}.conv1", f"{at}.bn1", x, stride, 1).relu()
                y = conv(f"{at}.conv2", f"{at}.bn2", y, 1, 1)
            x = (y + short).relu()
    return x.mean((2, 3))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_timm_finds_its_names_shapes_and_features(tmp_path, name):
    table = colour(tmp_path)
    adapter = make_adapter({"name": name, "stem": "imagenet"}, tmp_path, **table)
    out = tmp_path / "out"
    out.mkdir()
    adapter.export("timm", out, record())
    weights = load_file(out / "model.safetensors")
    assert {key: tuple(value.shape) for key, value in weights.items()} == timm_shapes(name)
    config = json.loads((out / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == (name, 0)
    mean, std = (torch.tensor(config["pretrained_cfg"][part])[:, None, None] for part in ("mean", "std"))
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        found = timm_features(weights, (images - mean) / std, name)
        torch.testing.assert_close(found, adapter.module.features(images), atol=1e-4, rtol=1e-4)


def test_timm_has_no_other_networks():
    from dipole.vision.export.timm import timm_weights

    for settings in ({"name": "small-conv"}, {"name": "resnet18"}):
        with pytest.raises(ConfigError, match="timm has no network like"):
            timm_weights(build_encoder(EncoderConfig(**settings), 3, 32))


@pytest.mark.parametrize("to", ["transformers", "timm", "detectron2", "picture"])
def test_every_folder_has_a_card_that_the_hub_reads(tmp_path, to):
    from huggingface_hub import ModelCard

    adapter = make_adapter({"name": "resnet18", "stem": "imagenet"}, Path(), **colour(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    adapter.export(to, out, record())
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "unknown"
    assert "dipole" in card.data.tags
    (result,) = card.data.eval_results
    assert (result.metric_name, result.metric_value) == ("linear/accuracy", 0.5)
    assert "0.1 x `dp`" in card.text
    assert adapter.data_info()["fingerprint"] in card.text
