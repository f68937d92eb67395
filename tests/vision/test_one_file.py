"""A source of images, an encoder and a framework are one file each: put into their folders, they are there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systems import links

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
    stage = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return stage
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
PROGRAM = """
import json, sys
from pathlib import Path
from dipole.core.cli import main
from dipole.core.utils.errors import DipoleError
from dipole.core.train.recipe import load
from dipole.core.train.run import train

SETTINGS = ["vision.data.source=stripes:6", "vision.encoder.name=mean-pixel", "vision.method=oneway",
            "vision.oneway.scale=2.0", "train.batch_size=8", "train.epochs=1", "vision.probe.probes=['knn']",
            "vision.probe.baselines=false"]
config = load("digits-simclr", SETTINGS).config
record = train(config, Path(sys.argv[1]), quiet=True)
problems = []
for wrong in (["vision.encoder.name=mean-pixl"], ["vision.method=onway"], ["vision.negatives=3"],
              ["vision.moco.momentum=0.5"],              ["vision.data.source=stipes"], ["objective=cacr(k=3)"]):
    try:
        train(load("digits-simclr", [*SETTINGS, *wrong]).config, Path(sys.argv[1]), quiet=True)
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
    environment = {**os.environ, "PYTHONPATH": str(house)}
    command = [sys.executable, "-c", PROGRAM, str(house / "runs")]
    done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    status, name, problems = json.loads(last)
    assert (status, name) == ("done", "stripes")
    encoder, method, negatives, other, source, views = problems
    assert "Did you mean 'mean-pixel'" in encoder
    assert "resnet18" in encoder
    assert "Did you mean 'oneway'" in method
    assert "negatives has no effect with method 'oneway'; all of the batch's are taken" in negatives
    assert "[vision.moco] has no effect with method 'oneway'" in other
    assert "stripes of N pixels, as stripes:N" in source
    assert "vision.method = 'oneway' cannot carry" in views
    assert "simclr (views = 4)" in views
    shown = "\n".join(table)
    assert "oneway.scale" in shown
    assert "only with method = 'oneway'" in shown
    assert "stripes:N" in shown
