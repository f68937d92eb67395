"""Encoders: shapes of the taps, statistics inside the module, and that one file adds a source or a framework."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dipole.core.utils.errors import ConfigError
from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector
from dipole.vision.encoders.base import ENCODERS, as_encoder
from tests.ranks import run_python
from tests.runs import refused
from tests.systems import links


@pytest.mark.parametrize(("name", "channels", "size", "taps"), [
    ("small-conv", 1, 16, {"pooled": 256}), ("alexnet", 3, 32, {"conv5": 192 * 9, "fc6": 4096, "fc7": 4096}),
    ("vgg16", 3, 32, {"pooled": 512, "fc": 100}), ("linear", 1, 2, {"map": 16}),
    ("resnet18", 3, 32, {"pooled": 512}), ("resnet50", 2, 32, {"pooled": 2048}),
])  # fmt: skip
def test_taps_have_the_widths_they_claim_and_halves_of_cmc_half_of_them(name, channels, size, taps):
    encoder = build_encoder(EncoderConfig(name=name), channels, size)
    assert encoder.taps == taps
    images = torch.rand(3, channels, size, size)
    for tap, width in taps.items():
        assert encoder(images, tap).shape == (3, width)
    encoder.eval()
    torch.testing.assert_close(encoder(images), encoder(images, encoder.last))
    if name in ("alexnet", "resnet18", "resnet50"):
        half = build_encoder(EncoderConfig(name=name), channels, size, share=0.5).eval()
        assert half(images).shape == (3, half.taps[half.last]) == (3, taps[encoder.last] // 2)
        count, whole = (sum(p.numel() for p in each.parameters()) for each in (half, encoder))
        assert 0.23 < count / whole < 0.27  # a layer between two halved ones has a quarter of the weights


def test_resnets_have_the_parameters_and_resolution_of_the_literature():
    for stem, size, count in (("cifar", 32, 23_500_352), ("imagenet", 64, 23_508_032)):
        encoder = build_encoder(EncoderConfig(name="resnet50", stem=stem), 3, size)
        assert sum(p.numel() for p in encoder.parameters()) == count
    assert encoder(torch.rand(2, 3, 64, 64)).shape == (2, 2048)
    encoder = build_encoder(EncoderConfig(name="resnet18", stem="cifar"), 3, 32)
    assert encoder.model.embedder(torch.rand(1, 3, 32, 32)).shape == (1, 64, 32, 32)


def test_statistics_are_part_of_the_module():
    encoder = build_encoder(EncoderConfig(name="linear", width=4), 3, 2)
    images = torch.rand(5, 3, 2, 2)
    plain = encoder(images)
    encoder.set_statistics([0.1, 0.2, 0.3], [0.5, 0.5, 0.25])
    shifted = (images - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 0.5, 0.25])[:, None, None]
    torch.testing.assert_close(encoder(images), shifted.flatten(1) @ encoder.stages["map"][1].weight.T)
    assert not torch.allclose(encoder(images), plain)
    assert "mean" in encoder.state_dict()


def test_projectors_taps_and_tiny_images():
    assert build_projector(EncoderConfig(projector="none"), 7)[1] == 7
    linear, dim = build_projector(EncoderConfig(projector="linear", dim=5), 7)
    assert (linear(torch.rand(2, 7)).shape, dim) == ((2, 5), 5)
    mlp, dim = build_projector(EncoderConfig(hidden=11, dim=5), 7)
    assert (mlp[0].weight.shape, mlp(torch.rand(2, 7)).shape) == ((11, 7), (2, dim))
    said = r"no layer 'fc8'.*Did you mean 'fc[67]'.*Allowed: conv5, fc6, fc7"
    refused(ConfigError, said, build_encoder, EncoderConfig(name="alexnet", tap="fc8"), 3, 32)
    refused(ConfigError, "15 x 15", build_encoder, EncoderConfig(name="alexnet"), 1, 8)


def test_a_registered_function_may_return_any_module():
    """From a recipe: the module is normalised by the training set, and its width is measured."""
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.AdaptiveAvgPool2d(2))
    encoder = as_encoder(module, 1, 8)
    assert encoder.taps == {"features": 20}
    assert module.training
    assert int(module[1].num_batches_tracked) == 0
    encoder.set_statistics([0.5], [0.25])
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(encoder.eval()(images), module((images - 0.5) / 0.25).flatten(1))


ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
"""Stripes."""
import torch
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import Source, register_source


@register_source("stripes of N pixels, as stripes:N", matches=lambda text, path: text.startswith("stripes:"))
def stripes(source, options, wanted):
    def read(split):
        side = int(source.partition(":")[2])
        pixels = torch.arange(40 * side * side, dtype=torch.long).remainder(251).to(torch.uint8)
        return ImageSet("stripes", pixels.view(40, 1, side, side), torch.arange(40) % 2)

    return Source(source, ("train",), read)
'''
ENCODER = '''
"""The mean of the pixels."""
from torch import nn
from dipole.vision.encoders.base import register_encoder


@register_encoder("mean-pixel")
def mean_pixel(channels, size, config, share):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
'''
FRAMEWORK = '''
"""One view finds the other."""
import torch
from pydantic import Field
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.vision.frameworks.base import OneBranch, embedded, register_framework


class OneWayConfig(Settings):
    """The [vision.oneway] table."""

    scale: float = Field(1.0, gt=0, description="of the queries")


@register_framework("oneway")
class OneWay(OneBranch):
    """One view finds the other."""

    table = OneWayConfig
    without_negatives = "all of the batch's are taken"

    @classmethod
    def from_config(cls, config, setup):
        method = cls(setup.branch())
        method.scale = config.own_table.scale
        return method

    @classmethod
    def sample(cls, views, rows, labels):
        return Pairs.cross(rows(), rows(), labels=labels)

    def embed(self, batch):
        query, key = (self.branch(view) for view in batch.views)
        return embedded({"query": self.scale * query, "key": key}, batch, self.pair)

    def pair(self, rows, seed):
        return Pairs.cross(rows["query"], rows["key"], labels=rows.get("labels"))
'''
WRONG = {
    "vision.encoder.name=mean-pixl": ["Did you mean 'mean-pixel'", "resnet18"],
    "vision.method=onway": ["Did you mean 'oneway'"],
    "vision.negatives=3": ["negatives has no effect with method 'oneway'; all of the batch's are taken"],
    "vision.moco.momentum=0.5": ["[vision.moco] has no effect with method 'oneway'"],
    "vision.data.source=stipes": ["stripes of N pixels, as stripes:N"],
    "objective=cacr(k=3)": ["vision.method = 'oneway' cannot carry", "simclr (views = 4)"],
}
PROGRAM = f"""
import json, sys
from pathlib import Path
from dipole.core.cli import main
from dipole.core.utils.errors import DipoleError
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train

SETTINGS = ["vision.data.source=stripes:6", "vision.encoder.name=mean-pixel", "vision.method=oneway",
            "vision.oneway.scale=2.0", "train.batch_size=8", "train.epochs=1", "vision.probe.probes=['knn']",
            "vision.probe.baselines=false"]
record = train(load_recipe("digits-simclr", SETTINGS).config, Path(sys.argv[1]), quiet=True)
problems = []
for wrong in {list(WRONG)}:
    try:
        train(load_recipe("digits-simclr", [*SETTINGS, wrong]).config, Path(sys.argv[1]), quiet=True)
    except DipoleError as error:
        problems.append(str(error))
main(["show", "vision"])
print(json.dumps([record.status, record.data["name"], problems]))
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """The packages with a vision of its own, to which three files have been added."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "dipole").mkdir()
    for file in ("__init__.py", "__init__.pyi", "__main__.py"):
        shutil.copy(ROOT / "dipole" / file, folder / "dipole" / file)
    for package in ("core", "benchmarks"):
        (folder / "dipole" / package).symlink_to(ROOT / package)
    vision = folder / "dipole" / "vision"
    shutil.copytree(ROOT / "vision", vision, ignore=shutil.ignore_patterns("__pycache__"))
    rooms = {"sources/stripes": SOURCE, "encoders/mean_pixel": ENCODER, "frameworks/one_way": FRAMEWORK}
    for place, text in rooms.items():
        (vision / f"{place}.py").write_text(text)
    return folder


@links
def test_three_files_are_a_source_an_encoder_and_a_framework(house):
    done = run_python("-c", PROGRAM, house / "runs", cwd=house, PYTHONPATH=str(house))
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    status, name, problems = json.loads(last)
    assert (status, name) == ("done", "stripes")
    for problem, words in zip(problems, WRONG.values(), strict=True):
        assert all(each in problem for each in words), problem
    shown = "\n".join(table)
    assert all(each in shown for each in ("oneway.scale", "only with method = 'oneway'", "stripes:N"))


# Modules that ignore eval(). The last is an expert that reads one image of each batch.
SLIPS = {
    "none": lambda x: x, "dropout": lambda x: nn.functional.dropout(x, 0.5), "noise": lambda x: x + torch.randn(768),
    "mask": lambda x: x * (torch.rand(768) > 0.75), "batch": lambda x: x - x.mean(0) / 2,
    "capacity": lambda x: x * (torch.arange(len(x)) == len(x) - 1).unsqueeze(1),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLIPS)
def test_encoders_that_stay_random_in_evaluation_are_refused(monkeypatch, kind):
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 8))
    network[0].register_forward_hook(lambda module, images, flat: SLIPS[kind](flat))
    monkeypatch.setitem(ENCODERS, f"random-{kind}", lambda *_: network)
    config = EncoderConfig(name=f"random-{kind}")
    if kind == "none":
        assert build_encoder(config, 3, 16).training
        return
    refused(ConfigError, rf"'random-{kind}' .*is random in evaluation mode", build_encoder, config, 3, 16)
