"""New encoders: word tables, transformers from a config or a checkpoint."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dipole.core.ground.errors import ConfigError
from dipole.text.encoders.networks import Direction, Transformer, WordGRU


def trained_table(words: int, width: int) -> nn.Embedding:
    """Word embeddings to be learned, uniform in [-0.1, 0.1] as in the authors' code."""
    table = nn.Embedding(words, width)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return table


def fixed_table(vectors: Tensor, known: Tensor) -> nn.Embedding:
    """Pretrained word vectors that are not learned.

    Args:
        vectors: (V, d), row 0 the unknown word. known: (V,) bool, the words that have a vector; the others and the
            unknown word share one vector, uniform in [0, 1) as in the authors' code.
    """
    rows = vectors.clone()
    rows[~known] = torch.rand(vectors.shape[1])
    return nn.Embedding.from_pretrained(rows, freeze=True)


def word_gru(table: nn.Embedding, width: int, direction: Direction) -> WordGRU:
    """A GRU over word embeddings, see `WordGRU`; raises ConfigError for a width that cannot be halved."""
    try:
        return WordGRU(table, width, direction)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def build_transformer(source: str, pooling: Literal["mean", "cls"], vocabulary: int) -> Transformer:
    """Make a transformer from a config file (random weights), or load a checkpoint folder or a name on the Hub."""
    from transformers import AutoConfig, AutoModel

    path = Path(source)
    weights = (path.is_dir() and any(path.glob("*.safetensors"))) or (path.is_dir() and any(path.glob("*.bin")))
    try:
        if path.is_file() or (path.is_dir() and not weights):
            config = AutoConfig.from_pretrained(str(path))
            if config.vocab_size < vocabulary:
                config.vocab_size = vocabulary
            model = AutoModel.from_config(config)
        else:
            model = AutoModel.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"text.transformer = {source!r} cannot be loaded: {str(error).splitlines()[0]}. Give a config.json, "
            f"a checkpoint folder, or a name on the Hugging Face Hub."
        ) from error
    if model.config.vocab_size < vocabulary:
        raise ConfigError(
            f"text.transformer = {source!r} knows {model.config.vocab_size} tokens, the tokenizer has {vocabulary}; "
            f"give the tokenizer that belongs to it"
        )
    return Transformer(model, pooling)


def small_transformer(
    vocabulary: int, width: int, layers: int, heads: int, pooling: Literal["mean", "cls"]
) -> Transformer:
    """A BERT encoder of the given size with random weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Transformer(BertModel(config, add_pooling_layer=False), pooling)
