"""Decoder models as sentence encoders: pooling, padding token and exports."""

from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    ReformerConfig,
)

from dipole.core.utils.errors import ConfigError, OptionError
from dipole.text.config import TextSettings
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.tail import POOLING, Pooled
from dipole.text.export import export_as
from dipole.text.exported import open_folder
from dipole.text.model import build_model, build_transformer
from dipole.text.senteval.encoders import as_encode
from dipole.text.vocabulary import load_tokens
from tests.text.tiny_sentences import Record

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CONFIGS = {
    "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, vocab_size=300),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=1, vocab_size=300, max_position_embeddings=64),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8, vocab_size=300, max_position_embeddings=64),
    "bert": BertConfig(**SMALL, vocab_size=300, max_position_embeddings=64),
}
TEXTS = ["the cat", "a mat and rain in the home", "rain " * 60, *(f"rain {i}" for i in range(5))]


def model_of(folder, name, pooling, pad=None):
    """A small model with random weights, and a byte-level tokenizer that adds no tokens."""
    torch.manual_seed(0)
    AutoModel.from_config(CONFIGS[name]).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|end|>", "<|hole|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=290, **options)
    tokenizer.train_from_iterator(["the cat sat on a mat in the rain"] * 4, trainer)
    special = {"pad_token": pad} if pad else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", **special).save_pretrained(folder)
    config = TextSettings(
        corpus="none", encoder="transformer", transformer=str(folder), tokenizer="any", sides=1, pooling=pooling
    )
    tokens = load_tokens(folder)
    return SentenceEncoder(build_model(config, len(tokens), None).eval(), tokens, "none", 32)


GPT2, QWEN3 = ("gpt2", "lasttoken", None), ("qwen3", "mean", "<|hole|>")
SIMPLE = "sentence-transformers", "transformers"


@pytest.mark.parametrize(
    ("decoder", "to"),
    [*product((GPT2, QWEN3), SIMPLE), *(pytest.param(each, "onnx", marks=pytest.mark.slow) for each in (GPT2, QWEN3))],
)
def test_decoders_are_exported(tmp_path, decoder, to):
    """With the saved padding token, or the end of text where there is none."""
    name, pooling, pad = decoder
    encoder = model_of(tmp_path / "model", name, pooling, pad)
    (tmp_path / "out").mkdir()
    export_as(to, encoder, tmp_path / "out", Record())
    found = open_folder(tmp_path / "out", torch.device("cpu"), None).vectors(TEXTS).numpy()
    assert found == pytest.approx(encoder.encode(TEXTS), abs=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == (pad or "<|end|>")


def test_onnx_has_every_pooling_and_any_number_of_sentences(tmp_path):
    encoder = model_of(tmp_path / "model", "llama", "mean")
    encoder.model.f = Pooled(encoder.model.f, POOLING, []).eval()
    encoder.model.output_width = encoder.model.width = encoder.model.f.width
    (tmp_path / "out").mkdir()
    export_as("onnx", encoder, tmp_path / "out", Record())
    opened = open_folder(tmp_path / "out", torch.device("cpu"), None)
    for count in (1, 2, len(TEXTS)):
        assert opened.vectors(TEXTS[:count]).numpy() == pytest.approx(encoder.encode(TEXTS[:count]), abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_token_of_a_decoder_is_no_vector_of_a_sentence(tmp_path, name):
    if name == "bert":
        assert model_of(tmp_path, name, "cls").width == 16
        return
    with pytest.raises(ConfigError, match=r"causal model .*text.pooling = 'lasttoken'"):
        model_of(tmp_path, name, "cls")
    with pytest.raises(OptionError, match=r"causal model .*pooling='mean'"):
        as_encode(AutoModel.from_pretrained(tmp_path), pooling="cls")
    with pytest.raises(OptionError, match="AutoTokenizer"):
        as_encode(AutoModel.from_pretrained(tmp_path), tokenizer=str(tmp_path))


def test_a_model_that_is_random_in_evaluation_is_refused(tmp_path):
    """Reformer hashes states at random, in sentences longer than its chunk of 64."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8, "feed_forward_size": 32}
    sizes |= {"num_hashes": 1, "num_buckets": 4, "vocab_size": 300, "is_decoder": False}
    config = ReformerConfig(attn_layers=["lsh"], axial_pos_embds=False, **sizes)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="ReformerModel is random in evaluation mode"):
        build_transformer(str(tmp_path), "mean", 300)
