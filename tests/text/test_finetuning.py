"""Fine-tune a given transformer, frozen, with adapters or a head, and decoders. Export each of them."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file, save_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModel, AutoTokenizer

from dipole.core.cli import main
from dipole.core.train.finetuning import LoraTable
from dipole.core.train.model import load_run
from dipole.core.train.recipe import load_recipe, resolve
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.signals import RunInterruptedError
from dipole.core.utils.errors import CheckpointError, ConfigError, OptionError
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.batch import make_batch
from dipole.text.encoders.networks import POOLING, Pooled
from dipole.text.export import export_as
from dipole.text.exported import open_folder
from dipole.text.model import build_model, build_transformer, limit_of
from dipole.text.senteval.engine import as_encode
from dipole.text.vocabulary import load_tokens, words_vocabulary
from tests.runs import Record, commanded, interrupted, refused, run_of
from tests.text import test_using as using
from tests.text.made import CPU, write_bert, write_rows
from tests.text.test_using import SENTENCES, trained, vectors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"), 20, num_hidden_layers=3)


def built(folder, vocabulary=10, **settings):
    torch.manual_seed(1)
    return build_transformer(TextSettings(encoder="transformer", transformer=str(folder), **settings), vocabulary)


def test_the_states_are_those_of_transformers_also_with_new_adapters(checkpoint):
    part = built(checkpoint).eval()
    ids = [np.array(each) for each in ([1, 2, 3], [4, 5], [6, 7, 8, 1])]
    batch = make_batch(ids[:1], 1)
    expected = AutoModel.from_pretrained(checkpoint).eval()(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
    assert torch.allclose(part(batch.chunks[0]), expected.mean(1), atol=1e-6)
    assert part.described["weights"] == "pretrained"
    assert "with the weights" in part.remarks[0]
    assert built(checkpoint, weights="random").described["weights"] == "random"
    assert built(checkpoint / "config.json").described["weights"] == "random"
    part = built(checkpoint, lora=LoraTable(rank=2, targets=("query", "value")))
    assert len([each for each in part.parameters() if each.requires_grad]) == 3 * 2 * 2
    batch = make_batch(ids, 1)
    plain = built(checkpoint).eval()(batch.chunks[0])
    assert torch.allclose(part.eval()(batch.chunks[0]), plain, atol=1e-6)


@pytest.mark.parametrize(("how", "expected"), [(1, {"1", "2"}), (2, {"2"}), ("backbone", set())])
def test_frozen_layers_learn_nothing_and_drop_nothing(checkpoint, how, expected):
    part = built(checkpoint, freeze=how).train()
    assert {name.split(".")[3] for name, each in part.named_parameters() if each.requires_grad} == expected
    assert part.model.embeddings.dropout.training is False
    assert part.model.encoder.layer[2].output.dropout.training is (how != "backbone")


def test_what_is_wrong_is_said_once(checkpoint, tmp_path):
    refused(ConfigError, r"text\.freeze: 4 layers cannot be frozen, BertModel has 3", built, checkpoint, freeze=4)
    nothing = LoraTable(targets=("nothing",))
    refused(ConfigError, r"text\.lora\.targets: .*'nothing'.*query", built, checkpoint, lora=nothing)
    transformers.ViTConfig().save_pretrained(tmp_path)
    refused(ConfigError, "it is a vit model, which reads images; give one that reads text", built, tmp_path)
    for settings in ({"freeze": 1}, {"lora": {}}, {"weights": "random"}):
        with pytest.raises(ValidationError, match="no effect without transformer"):
            TextSettings.model_validate_json(json.dumps({"encoder": "transformer", **settings}))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 32}
    sizes |= {"num_hashes": 1, "num_buckets": 4, "vocab_size": 300, "is_decoder": False}
    # Reformer hashes states at random, in sentences longer than its chunk of 64.
    reformer = transformers.ReformerConfig(attn_layers=["lsh"], axial_pos_embds=False, **sizes)
    canine, characters = transformers.CanineConfig(**SMALL), "canine model reads characters"
    for config, words in ((reformer, "ReformerModel is random in evaluation mode"), (canine, characters)):
        AutoModel.from_config(config).save_pretrained(tmp_path)
        refused(ConfigError, words, built, tmp_path, 300)


def test_a_folder_counts_by_its_content(checkpoint, tmp_path):
    def config(folder, **settings):
        text = {"encoder": "transformer", "transformer": str(folder), **settings}
        return resolve({"domain": "text", "train": {"steps": 1}, "text": text}).config

    shutil.copytree(checkpoint, tmp_path / "moved")
    assert config(tmp_path / "moved").hash == config(checkpoint).hash
    assert config(checkpoint, freeze=1).hash != config(checkpoint).hash
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"other")
    assert config(tmp_path / "moved").hash != config(checkpoint).hash


BERT = {
    "encoder": "transformer", "transformer": "bert", "tokenizer": "bert", "sides": 1, "normalize": "none",
    "hidden_size": None, "word_size": None, "pooling": "cls",
}  # fmt: skip
FORMATS = ("sentence-transformers", "transformers", "onnx")


def states(adapter):
    """[CLS] of the sentences, by the transformer alone."""
    tokens = adapter.tokens.encode(SENTENCES, 50)
    model = adapter.module.f.part.model.eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).last_hidden_state[:, 0] for ids in tokens])


def assert_every_format_gives(tmp_path, run, texts, wanted, formats=FORMATS):
    for to in formats:
        assert main(["export", str(run), "--to", to, "--out", str(tmp_path / to)]) == 0
        found = open_folder(tmp_path / to, CPU, None).vectors(texts).numpy()
        assert found == pytest.approx(wanted, abs=1e-5), to
        assert not [f for f in (tmp_path / to).rglob("*.*") if str(tmp_path).encode() in f.read_bytes()]


@pytest.mark.parametrize("head", [pytest.param("mlp", marks=pytest.mark.slow), "mlp_only_train"])
def test_the_head_is_trained_and_stays_only_where_it_should(tmp_path, head):
    run = trained(tmp_path / "there", head=head, **BERT)
    adapter = load_run(RunFolder(run), "cpu")[1]
    torch.manual_seed(0)
    linear = adapter.module.f.layers[0].linear if head == "mlp" else adapter.module.f.linear
    assert linear.weight.shape == (8, 8)
    assert not torch.equal(linear.weight, torch.nn.Linear(8, 8).weight)
    plain = states(adapter)
    wanted = torch.tanh(linear(plain)) if head == "mlp" else plain
    for found in (vectors(run), SentenceEncoder(adapter.module, adapter.tokens).encode(SENTENCES, normalize="none")):
        assert found == pytest.approx(wanted.detach().numpy(), abs=1e-6)
    assert_every_format_gives(tmp_path, run, SENTENCES, vectors(run), FORMATS[: 2 + (head == "mlp")])


@pytest.mark.parametrize(
    ("pooling", "formats"), [("cls", FORMATS[:2]), pytest.param("mean", FORMATS, marks=pytest.mark.slow)]
)
def test_adapters_are_merged_in_every_format(tmp_path, pooling, formats):
    run = trained(tmp_path / "there", **BERT | {"pooling": pooling})
    recipe = tmp_path / "there" / "recipe.toml"
    recipe.write_text(recipe.read_text() + "lora = {rank = 2}\n")
    adapted = commanded(recipe, tmp_path / "runs")
    assert not np.allclose(vectors(adapted), vectors(run), atol=1e-4)
    assert_every_format_gives(tmp_path, adapted, SENTENCES, vectors(adapted), formats)


@pytest.mark.parametrize("formats", [FORMATS[:2], pytest.param(FORMATS[2:], marks=pytest.mark.slow)])
def test_long_sentences_end_where_the_positions_do(tmp_path, monkeypatch, capsys, formats):
    def short(folder):
        words_vocabulary(using.WORDS).save(write_bert(folder, max_position_embeddings=128) / "tokenizer.json")

    def long(number):
        return " ".join(using.WORDS[(number + i) % 24] for i in range(139))

    rows = [{"id": f"{d}", "sentences": [long(16 * d + i) for i in range(16)]} for d in range(6)]
    monkeypatch.setattr(using, "write_transformer", short)
    monkeypatch.setattr(using, "write_corpus", lambda path: write_rows(path, rows))
    note = "text.max_length 200: the transformer has 128 positions, longer sentences are cut there"
    run = trained(tmp_path / "there", max_length=200, **BERT)
    train(load_recipe(tmp_path / "there" / "recipe.toml", []).config, tmp_path / "again", overwrite=True)
    assert capsys.readouterr().err.count(note) == 1
    with pytest.warns(UserWarning, match=note) as said:
        _, adapter, _ = load_run(RunFolder(run), "cpu")
    assert len(said) == 1
    encoder = adapter.encoder()
    with pytest.warns(UserWarning, match=note):
        assert main(["eval", str(run)]) == 0
    assert np.diff(adapter.sentences.offsets).max() == 128
    head = " ".join(long(0).split()[:128])
    assert np.array_equal(*encoder.encode([long(0), head]))
    assert_every_format_gives(tmp_path, run, [long(0), head], encoder.encode([long(0), head]), formats)
    module = torch.nn.ModuleList([adapter.module])
    assert limit_of(module) == 128
    module[0].f.model.embeddings.position_embeddings = torch.nn.Embedding(6, 8)
    assert limit_of(module) == 6


def test_a_run_does_not_go_on_with_another_corpus(tmp_path):
    run = trained(tmp_path / "there")
    recipe, corpus = tmp_path / "there" / "recipe.toml", tmp_path / "there" / "corpus.jsonl"
    before = corpus.read_text()
    with interrupted(TextAdapter, "before_step", 1), pytest.raises(RunInterruptedError):
        run_of(recipe, tmp_path / "runs")
    corpus.write_text(before.replace("word3 ", "word4 "))
    refused(CheckpointError, r"have changed since its checkpoint.*--resume never", run_of, recipe, tmp_path / "runs")
    corpus.write_text(before)
    assert run_of(recipe, tmp_path / "runs").results == RunFolder(run).read_record().results


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = SMALL | {"vocab_size": 300, "max_position_embeddings": 64}
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=300),
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8),
    "bert": transformers.BertConfig(**SIZES),
    "roberta": transformers.RobertaConfig(**SIZES | {"max_position_embeddings": 66}),
    "xlnet": transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=32, vocab_size=300),
    "t5": transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=300),
    "longt5": transformers.LongT5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=300),
}
DECODERS_TEXTS = ["the cat", "a mat and rain in the home", "rain " * 60, *(f"rain {i}" for i in range(5)), "", " "]


def model_of(folder, name, pooling, pad=None):
    """A small model with random weights, and a tokenizer that adds no tokens: of bytes, or Metaspace for LongT5."""
    torch.manual_seed(0)
    AutoModel.from_config(CONFIGS[name]).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "longt5":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|end|>", "<|hole|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=290, **options)
    tokenizer.train_from_iterator(["the cat sat on a mat in the rain"] * 4, trainer)
    special = {"pad_token": pad} if pad else {}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", **special)
    fast.save_pretrained(folder)
    settings = {"corpus": "none", "encoder": "transformer", "tokenizer": "any", "sides": 1}
    config, tokens = TextSettings(transformer=str(folder), pooling=pooling, **settings), load_tokens(folder)
    return SentenceEncoder(build_model(config, len(tokens), None).eval(), tokens, "none", 32)


GPT2, QWEN3 = ("gpt2", "lasttoken", None), ("qwen3", "mean", "<|hole|>")
SIMPLE = "sentence-transformers", "transformers"


@pytest.mark.parametrize(("decoder", "to"), [
    *product((GPT2, QWEN3), SIMPLE), *product([("t5", "lasttoken", None)], SIMPLE),
    *(pytest.param(each, "onnx", marks=pytest.mark.slow) for each in (GPT2, QWEN3, ("llama", "mean", None))),
    (("longt5", "mean", None), "transformers"),
])  # fmt: skip
def test_decoders_are_exported(tmp_path, decoder, to):
    """With the saved padding token or the end of text. Onnx has every pooling of Llama. T5 is its encoder alone."""
    name, pooling, pad = decoder
    encoder = model_of(tmp_path / "model", name, pooling, pad)
    if name == "llama":
        encoder.model.f = Pooled(encoder.model.f, POOLING, []).eval()
        encoder.model.output_width = encoder.model.width = encoder.model.f.width
    (tmp_path / "out").mkdir()
    export_as(to, encoder, tmp_path / "out", Record())
    opened = open_folder(tmp_path / "out", CPU, None)
    for count in (1, 2, len(DECODERS_TEXTS)):
        texts = DECODERS_TEXTS[:count]
        assert opened.vectors(texts).numpy() == pytest.approx(encoder.encode(texts), abs=1e-5)
    if to != "onnx":
        assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == (pad or "<|end|>")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_token_of_a_decoder_is_no_vector_of_a_sentence(tmp_path, name):
    if name in ("bert", "roberta", "xlnet", "t5", "longt5"):
        assert model_of(tmp_path, name, "cls").width == 16
        encode = as_encode(AutoModel.from_pretrained(tmp_path), 2, pooling="cls")
        assert np.isfinite(encode(["rain " * 100, "the cat", ""])).all()  # longer than its positions
        return
    refused(ConfigError, r"causal model .*text.pooling = 'lasttoken'", model_of, tmp_path, name, "cls")
    model = AutoModel.from_pretrained(tmp_path)
    refused(OptionError, r"causal model .*pooling='mean'", as_encode, model, pooling="cls")
    refused(OptionError, "AutoTokenizer", as_encode, model, tokenizer=str(tmp_path))


def odd_model(folder, name, **more):
    """A model whose sizes have names of their own."""
    torch.manual_seed(0)
    AutoModel.from_config(getattr(transformers, name)(**{**SMALL, "vocab_size": 300, **more})).save_pretrained(folder)
    return built(folder, 300)


LED = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1), "d_model": 16, "attention_window": 4,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
}  # fmt: skip
MPT = {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 64}


@pytest.mark.parametrize(("name", "more"), [
    ("MptConfig", MPT), *((f"{each}Config", {"max_position_embeddings": 66}) for each in ("IBert", "Roberta")),
    ("NystromformerConfig", {"max_position_embeddings": 64}), ("LEDConfig", LED),
])  # fmt: skip
def test_every_name_of_the_positions_is_known(tmp_path, name, more):
    part = odd_model(tmp_path, name, **more).eval()
    assert limit_of(part) == 64
    assert part(make_batch([np.arange(4, 68)], 1).chunks[0]).isfinite().all()


@pytest.mark.parametrize("name", ["XLMConfig", "FlaubertConfig"])
def test_a_token_with_the_id_of_padding_is_read(tmp_path, name):
    part = odd_model(tmp_path, name, emb_dim=16, n_layers=1, n_heads=2).eval()
    ids = torch.tensor([[20, 2, 21, 22]])  # 2 is their padding
    expected = part.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)
    assert torch.allclose(part(make_batch([ids[0].numpy()], 1).chunks[0]), expected, atol=1e-6)


def test_models_of_fused_weights_are_saved_and_padding_that_is_read_is_said(tmp_path, checkpoint):
    """transformers loads q, k and v of Nomic as parts of one tensor."""
    part = odd_model(tmp_path, "NomicBertConfig")
    save_model(part, str(tmp_path / "again.safetensors"))
    assert len(load_file(tmp_path / "again.safetensors")) == len(part.state_dict())
    assert odd_model(tmp_path, "RwkvConfig", num_hidden_layers=8).model.config.rescale_every == 0
    assert "FNetModel does not leave out padding" in odd_model(tmp_path, "FNetConfig").remarks[-1]
    assert "padding" not in str(built(checkpoint).remarks)
