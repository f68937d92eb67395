"""An exported encoder gives the same features when transformers loads it back."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dipole.core.errors import ConfigError
from dipole.core.seeding import Seeds, seed_everything
from dipole.vision.adapter import VisionAdapter
from dipole.vision.config import VisionConfig
from dipole.vision.export import DipoleVisionModel

RECORD = SimpleNamespace(
    name="r", objective="infonce", seed=0, epochs=1.0, results={"linear/accuracy": 0.5}, versions={}, hash="0" * 12
)


@pytest.mark.parametrize(
    "encoder", [{"name": "small-conv", "width": 4}, {"name": "vgg16", "tap": "pooled"}, {"name": "resnet18"}]
)
@pytest.mark.parametrize("method", ["simclr", "moco"])
def test_round_trip(tmp_path, encoder, method):
    if method == "moco" and encoder["name"] != "small-conv":
        pytest.skip("one encoder suffices for the second method")
    table = {"method": method, "encoder": {**encoder, "dim": 8}, "augment": {"size": 16}, "data": {"limit": 32}}
    if method == "moco":
        table["negatives"] = 8
    config = VisionConfig.model_validate_json(json.dumps(table))
    seed_everything(1)
    a = VisionAdapter(config, seed=Seeds(0), device=torch.device("cpu"), workdir=Path(), batch_size=8)
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
    from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector
    from dipole.vision.export import trained_encoder
    from dipole.vision.methods import CMC

    def build(channels):
        encoder = build_encoder(EncoderConfig(width=2), channels, 8)
        return encoder, *build_projector(EncoderConfig(dim=4), encoder.taps[encoder.last])

    with pytest.raises(ConfigError, match="two encoders"):
        trained_encoder(CMC(build, None, 4, None, 0.5))
