"""A transformer of one's own in text: frozen, with adapters, and exported with them merged."""

import json
import shutil

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dipole.core.train.config import TrainConfig
from dipole.core.train.finetuning import LoraTable
from dipole.core.train.optimizer import build_optimizer
from dipole.core.train.recipe import resolve
from dipole.core.utils.errors import ConfigError
from dipole.text import encoders
from dipole.text.config import TextSettings
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.batch import make_batch
from dipole.text.model import build_transformer
from dipole.text.vocabulary import words_vocabulary
from tests.text.made import write_bert

WORDS = ["the", "film", "was", "good", "bad", "very", ".", "boring", "great"]
TEXTS = ["the film was good .", "", "very very bad", "great"]
IDS = [np.array(ids) for ids in ([1, 2, 3], [4, 5], [6, 7, 8, 1])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"), 20, num_hidden_layers=3)


def built(folder, **settings):
    torch.manual_seed(1)
    return build_transformer(str(folder), "mean", 10, **settings)


def test_the_states_are_those_of_transformers(checkpoint):
    from transformers import AutoModel

    part = built(checkpoint).eval()
    batch = make_batch(IDS[:1], 1)
    expected = AutoModel.from_pretrained(checkpoint).eval()(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
    assert torch.allclose(part(batch.chunks[0]), expected.mean(1), atol=1e-6)
    assert part.described["weights"] == "pretrained"
    assert "with the weights" in part.remarks[0]
    assert built(checkpoint, weights="random").described["weights"] == "random"
    assert built(checkpoint / "config.json").described["weights"] == "random"


@pytest.mark.parametrize("how", [1, 2, "backbone"])
def test_frozen_layers_stay_as_they_are(checkpoint, how):
    part = built(checkpoint, freeze=how).train()
    before = {name: each.clone() for name, each in part.state_dict().items()}
    learning = [each for each in part.parameters() if each.requires_grad]
    if how != "backbone":
        optimizer = build_optimizer(TrainConfig(steps=1, weight_decay=0.1, optimizer="adamw"), part.parameters())
        part(make_batch(IDS, 1).chunks[0]).square().sum().backward()
        assert all(each.grad is not None for each in learning)
        optimizer.step()
    changed = {name for name, each in part.state_dict().items() if not torch.equal(each, before[name])}
    expected = {"1": {1, 2}, "2": {2}, "backbone": set()}[str(how)]
    assert {int(name.split(".")[3]) for name in changed} == expected
    # Dropout is off in what is frozen.
    assert part.model.embeddings.dropout.training is False
    assert part.model.encoder.layer[2].output.dropout.training is (how != "backbone")


def test_adapters_are_merged_where_they_are_exported(checkpoint, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    export = pytest.importorskip("dipole.text.export.sentence_transformers").export_sentence_transformer
    part = built(checkpoint, lora=LoraTable(rank=2, targets=("query", "value")))
    assert len([each for each in part.parameters() if each.requires_grad]) == 3 * 2 * 2
    batch = make_batch(IDS, 1)
    plain = built(checkpoint).eval()(batch.chunks[0])
    assert torch.allclose(part.eval()(batch.chunks[0]), plain, atol=1e-6)
    for name, parameter in part.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert not torch.allclose(part(batch.chunks[0]), plain, atol=1e-3)
    encoder = SentenceEncoder(encoders.SentenceModel(part, None), words_vocabulary(WORDS), "unit")
    before = encoder.encode(TEXTS)
    export(encoder, tmp_path / "out")
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=True)
    assert again.encode(TEXTS) == pytest.approx(before, abs=1e-5)
    assert encoder.encode(TEXTS) == pytest.approx(before)
    assert not [name for name, _ in again.named_parameters() if "lora" in name]


def test_what_is_wrong_is_said_once(checkpoint, tmp_path):
    from transformers import ViTConfig

    with pytest.raises(ConfigError, match=r"text\.freeze: 4 layers cannot be frozen, BertModel has 3"):
        built(checkpoint, freeze=4)
    with pytest.raises(ConfigError, match=r"text\.lora\.targets: .*'nothing'.*query"):
        built(checkpoint, lora=LoraTable(targets=("nothing",)))
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="it is a vit model, which reads images; give one that reads text"):
        built(tmp_path)
    for settings in ({"freeze": 1}, {"lora": {}}, {"weights": "random"}):
        with pytest.raises(ValidationError, match="no effect without transformer"):
            TextSettings.model_validate_json(json.dumps({"encoder": "transformer", **settings}))


def test_a_folder_counts_by_its_content(checkpoint, tmp_path):
    def config(folder, **settings):
        text = {"encoder": "transformer", "transformer": str(folder), **settings}
        return resolve({"domain": "text", "train": {"steps": 1}, "text": text}).config

    shutil.copytree(checkpoint, tmp_path / "moved")
    assert config(tmp_path / "moved").hash == config(checkpoint).hash
    assert config(checkpoint, freeze=1).hash != config(checkpoint).hash
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"other")
    assert config(tmp_path / "moved").hash != config(checkpoint).hash
