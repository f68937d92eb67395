"""A folder of sentence-transformers as `text.transformer`: vectors are the library's, before and after an export."""

import re
from importlib import import_module
from inspect import signature

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from dipole.core.utils.errors import ConfigError, DataError
from dipole.text import encoders
from dipole.text.config import TextSettings
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.batch import make_batch
from dipole.text.encoders.tail import POOLING
from dipole.text.export import export_sentence_transformer
from dipole.text.exported import open_folder
from dipole.text.model import build_model
from dipole.text.vocabulary import load_tokens
from tests.text.tiny_sentences import COLUMNS, tiny_model

TEXTS = COLUMNS["anchor"]


def library_model(folder, tail, pooling="mean"):
    """Written into a folder, with these modules behind the pooling."""
    transformer = tiny_model(folder / "bare")[0]
    torch.manual_seed(1)
    model = SentenceTransformer(modules=[transformer, modules.Pooling(16, pooling_mode=pooling), *tail()], device="cpu")
    model.save_pretrained(str(folder / "model"))
    return model


def ours(folder, **settings):
    tokens = load_tokens(str(folder / "model" / "tokenizer.json"))
    config = TextSettings(
        corpus="none", encoder="transformer", transformer=str(folder / "model"), tokenizer="any", sides=1, **settings
    )
    return build_model(config, len(tokens), None).eval(), tokens


TAILS = {
    "nothing": lambda: [],
    "dense": lambda: [modules.Dense(16, 6)],
    "dense without bias, normalised": lambda: [
        modules.Dense(16, 5, bias=False, activation_function=nn.Identity()), modules.Normalize()
    ],
    "residual, layer norm": lambda: [
        modules.Dense(16, 6, activation_function=nn.GELU(), use_residual=True), modules.LayerNorm(6)
    ],
    "dropout, normalised": lambda: [modules.Dropout(0.3), modules.Normalize()],
}  # fmt: skip


@pytest.mark.parametrize("tail", TAILS)
def test_modules_stay(tmp_path, tail):
    if "residual" in tail and "use_residual" not in signature(modules.Dense.__init__).parameters:
        pytest.skip("this sentence-transformers has no residual layers")
    wanted = library_model(tmp_path, TAILS[tail]).encode(TEXTS, convert_to_tensor=True)
    model, tokens = ours(tmp_path)
    found = model.represent(make_batch([tokens.tokenizer.encode(text).ids for text in TEXTS], 3))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert model.width == wanted.shape[1]
    again = encoders.from_architecture(encoders.architecture(model))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        again.eval().represent(make_batch([[2, 5, 3]])), model.represent(make_batch([[2, 5, 3]]))
    )
    export_sentence_transformer(SentenceEncoder(model, tokens, "none", 32), tmp_path / "exported")
    exported = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    torch.testing.assert_close(exported.encode(TEXTS, convert_to_tensor=True), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", [*POOLING, ["cls", "mean", "lasttoken"]])
def test_every_pooling(tmp_path, pooling):
    wanted = library_model(tmp_path, lambda: [], pooling).encode(TEXTS, convert_to_tensor=True)
    model, tokens = ours(tmp_path)
    found = model.represent(make_batch([tokens.tokenizer.encode(text).ids for text in TEXTS], 2))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_layers_are_trained(tmp_path):
    library_model(tmp_path, TAILS["dense"])
    model, _ = ours(tmp_path)
    model.represent(make_batch([[2, 5, 3], [2, 7, 8, 3]])).square().sum().backward()
    assert all(bool(p.grad.any()) for p in model.f.layers.parameters())


def test_what_cannot_be_read_is_one_message(tmp_path):
    library_model(tmp_path, TAILS["nothing"], "cls")
    listed = tmp_path / "model" / "modules.json"
    before = listed.read_text()
    listed.write_text(before.replace("pooling.Pooling", "x.WeightedLayerPooling"))
    with pytest.raises(ConfigError, match="is a SentenceTransformer of Transformer, WeightedLayerPooling"):
        ours(tmp_path)
    listed.write_text(before)
    assert ours(tmp_path)[0].f.pooling == ("cls",)


def test_pickles_are_read_only_where_that_is_allowed(tmp_path, monkeypatch):
    model = library_model(tmp_path, TAILS["dense"])
    whole, _ = ours(tmp_path)
    layer = next((tmp_path / "model").glob("2_*"))
    for path in (layer / "model.safetensors", tmp_path / "model" / "model.safetensors"):
        pickled = path.with_name("pytorch_model.bin")
        torch.save(load_file(path), pickled)
        path.unlink()
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin are a pickle.*DIPOLE_PICKLES=restricted") as caught:
            ours(tmp_path)
        command = re.search(r"python -m (\S+) (\S+pytorch_model.bin)", str(caught.value))
        with monkeypatch.context() as patch:
            patch.setenv("DIPOLE_PICKLES", "restricted")
            assert same_weights(ours(tmp_path)[0], whole)
        with pytest.raises(DataError, match="are a pickle"):
            open_folder(tmp_path / "model", torch.device("cpu"), None)
        assert import_module(command[1]).main([command[2]]) == 0
        assert same_weights(ours(tmp_path)[0], whole)
    again = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()


def same_weights(first, second):
    states = first.state_dict(), second.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[1][name], states[0][name]) for name in states[0]
    )
