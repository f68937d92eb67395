"""New encoders: word tables, transformers from a config or a checkpoint."""

from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.train.finetuning import LoraTable, fine_tune
from dipole.core.utils.backbone import Source, Weights, load
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.freezing import Freeze, fix_unused
from dipole.core.utils.modes import in_mode
from dipole.text.encoders.networks import Direction, Pooling, Transformer, WordGRU


def trained_table(words: int, width: int) -> nn.Embedding:
    """Word embeddings to be learned, uniform in [-0.1, 0.1] as in the authors' code."""
    table = nn.Embedding(words, width)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return table


def fixed_table(vectors: Tensor, known: Tensor) -> nn.Embedding:
    """Frozen pretrained word vectors (V, d).

    Words that are not `known` (V,) share one vector, uniform in [0, 1) as in the authors' code.
    """
    rows = vectors.clone()
    rows[~known] = torch.rand(vectors.shape[1])
    return nn.Embedding.from_pretrained(rows, freeze=True)


def word_gru(table: nn.Embedding, width: int, direction: Direction) -> WordGRU:
    """Return a GRU over word embeddings, see `WordGRU`. Raise ConfigError for a width that cannot be halved."""
    try:
        return WordGRU(table, width, direction)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def build_transformer(
    source: str,
    pooling: Pooling,
    vocabulary: int,
    *,
    freeze: Freeze = "none",
    lora: LoraTable | None = None,
    weights: Weights | None = None,
) -> Transformer:
    """Build a transformer from a checkpoint folder, a name on the Hub or a config file.

    A config file, or weights = "random", gives random weights. The vocabulary of a config file is enlarged to the
    number of tokens `vocabulary`. Raise ConfigError if the model cannot be loaded, reads no text, or contradicts a
    setting.
    """
    place = Source(source, "text.transformer", weights)
    random = weights == "random" or (place.path is not None and not place.weight_files)

    def enlarged(config: Any) -> None:
        if random and config.vocab_size < vocabulary:
            config.vocab_size = vocabulary

    built = load(place, "input_ids", enlarged)
    if built.model.config.vocab_size < vocabulary:
        raise ConfigError(
            f"text.transformer = {source!r} knows {built.model.config.vocab_size} tokens, the tokenizer has "
            f"{vocabulary}; give the tokenizer that belongs to it"
        )
    try:
        with torch.enable_grad():
            states = built.model(input_ids=torch.zeros(1, 1, dtype=torch.long)).last_hidden_state
    except Exception as error:  # each architecture has its own
        reason = str(error).strip().partition("\n")[0]
        raise place.error(f"{type(built.model).__name__} gives no states for tokens alone ({reason})") from error
    fix_unused(built.model, states)
    fine_tune(built.model, freeze, lora, "text")
    part = Transformer(built.model, pooling)
    part.described, part.remarks = built.described(place), tuple(built.remarks(place))
    return part


@torch.no_grad()
def check_first_token(model: Any, source: str) -> None:
    """Raise ConfigError if the first token of a transformer does not see the others, as in a decoder.

    Pooled there ("cls"), all sentences that begin alike would have one vector.
    """
    words = model.config.vocab_size
    ids = torch.tensor([[0, 1, 2], [0, 2, 1]]) % words
    with in_mode(False, model):
        first, second = model(input_ids=ids).last_hidden_state[:, 0]
    if words > 2 and torch.allclose(first, second, rtol=1e-6, atol=1e-6):
        raise ConfigError(
            f"text.pooling = 'cls' takes the first token, which sees no other token in the causal model {source!r}: "
            f"sentences would have one vector. Set text.pooling = 'lasttoken' or 'mean'."
        )


def small_transformer(vocabulary: int, width: int, layers: int, heads: int, pooling: Pooling) -> Transformer:
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
