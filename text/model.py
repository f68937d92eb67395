"""Build the encoders of a run, clip their gradients, and expand their vocabulary."""

import copy
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.train.finetuning import fine_tune
from dipole.core.utils.backbone import NetworkSource, is_random, load, positions
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.freezing import fix_unused, in_mode
from dipole.text.config import TextSettings
from dipole.text.encoders import networks
from dipole.text.encoders.batch import Chunk
from dipole.text.encoders.networks import BagOfWords, Channels, Encoder, Pooled, SentenceModel, Transformer, WordGRU
from dipole.text.encoders.sentence_folder import with_modules
from dipole.text.vocabulary import Tokens, expand, read_vectors, words_vocabulary

LONG = 200  # tokens


def build_model(c: TextSettings, words: int, fixed: nn.Embedding | None) -> SentenceModel:
    """Build f and g with new weights, for `words` tokens. `fixed` are word vectors that are not learned."""
    f, g = _side(c, words, fixed), None
    parts = [part for part in f.modules() if isinstance(part, Transformer)]
    pools = [part.pooling for part in f.modules() if isinstance(part, Pooled | Transformer)]
    if c.transformer is not None and "cls" in pools[0] and is_first_token_blind(parts[0].model):
        raise ConfigError(
            f"text.pooling = 'cls' takes the first token, which sees no other token in the causal model "
            f"{c.transformer!r}: sentences would have one vector. Set text.pooling = 'lasttoken' or 'mean'."
        )
    if c.sides == 2 and c.pairs != "blocks":  # one encoder reads all members of a block, as in Arora et al.
        g = _side(c, words, fixed)
    # With rows_drop the adapter draws a mask for each row, for the rows of all ranks.
    return SentenceModel(f, g, dropout=0.0 if c.rows_drop else c.dropout)


def _side(c: TextSettings, words: int, fixed: nn.Embedding | None) -> Encoder:
    if c.encoder == "transformer":
        if c.transformer is None:
            part = small_transformer(words, c.hidden_size, c.layers, c.heads, c.pooling)
        else:
            part = build_transformer(c, words)
        if c.rows_drop and c.dropout:
            with_dropout(part, c.dropout)
        return with_head(with_modules(part, c.transformer, c.pooling), c.head)
    tables = [] if fixed is None else [fixed]
    if c.channels != "fixed":
        tables.append(trained_table(words, c.word_size))
    parts: list[Encoder] = [BagOfWords(table) for table in tables]
    if c.encoder == "gru":
        parts = [WordGRU(table, c.hidden_size, c.direction) for table in tables]
    return parts[0] if len(parts) == 1 else Channels(parts)


def with_dropout(part: Transformer, rate: float) -> None:
    """Set one rate for all dropout of a transformer: its layers, and the numbers in its attention."""
    for module in part.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, rate)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout", "dropout_rate")
    config = part.model.config
    config.update({name: rate for name in names if isinstance(getattr(config, name, None), float)})


def limit_of(model: nn.Module) -> int | None:
    """Return the most tokens that the transformers of a model can read, or None."""
    inner: list[Any] = [part.model for part in model.modules() if isinstance(part, Transformer)]
    return min((found for found in map(positions, inner) if found is not None), default=None)


def positions_of(c: TextSettings) -> int | None:
    """Return `limit_of` the transformer of the settings before it is built."""
    if c.encoder != "transformer":
        return None
    with torch.device("meta"):
        if c.transformer is None:
            return limit_of(small_transformer(1, c.hidden_size, c.layers, c.heads, c.pooling))
        return positions(load(NetworkSource(c.transformer, "text.transformer", c.weights), "input_ids").model)


def fixed_table(c: TextSettings, tokens: Tokens) -> nn.Embedding | None:
    """Read the word vectors that are not learned. Return None if all are learned."""
    if c.channels == "trained":
        return None
    assert c.vectors is not None  # the configuration has checked it
    words, vectors = read_vectors(c.vectors, tokens.index)
    if not words:
        raise DataError(f"{c.vectors} holds no word of the corpus {c.corpus}")
    rows = torch.tensor([tokens.index[word] for word in words])
    table = torch.zeros(len(tokens), vectors.shape[1]).index_copy(0, rows, torch.from_numpy(vectors))
    return frozen_table(table, torch.isin(torch.arange(len(tokens)), rows))


@torch.no_grad()
def clip_each(model: nn.Module, limit: float) -> None:
    """Clip the gradient norm of each tensor separately, as the authors' code does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(limit / torch.linalg.vector_norm(parameter.grad).clamp_min(limit))


def expanded(model: SentenceModel, tokens: Tokens, path: str) -> tuple[SentenceModel, Tokens]:
    """Copy model and vocabulary and add the words of a vector file, to each trained table by its own linear map."""
    words, vectors = read_vectors(path)
    model = copy.deepcopy(model)
    old = tokens.words()
    lower = bool(tokens.tokenizer.normalizer and "Lowercase" in str(tokens.tokenizer.normalizer))
    added: list[str] = []
    for module in (part for part in model.modules() if isinstance(part, BagOfWords | WordGRU)):
        table = module.table
        if table.weight.requires_grad:
            added, rows = expand(tokens.index, table.weight.detach().numpy(), words, vectors)
        else:
            new = [i for i, word in enumerate(words) if word not in tokens.index and "_" not in word]
            added, rows = [words[i] for i in new], vectors[new]
        weight = torch.cat([table.weight.detach(), torch.from_numpy(np.ascontiguousarray(rows))])
        module.table = nn.Embedding.from_pretrained(weight, freeze=not table.weight.requires_grad)
    return model, words_vocabulary([*old[1:], *added], lower)


class Headed(Encoder):
    """An encoder with a head of its own width in training (unsupervised SimCSE)."""

    def __init__(self, part: Pooled | Transformer) -> None:
        super().__init__()
        self.part, self.width = part, part.width
        self.linear = nn.Linear(part.width, part.width)
        self.described, self.remarks = part.described, part.remarks

    def forward(self, chunk: Chunk) -> Tensor:
        found: Tensor = self.part(chunk)
        return torch.tanh(self.linear(found)) if self.training else found


def with_head(part: Pooled | Transformer, head: Literal["none", "mlp", "mlp_only_train"]) -> Encoder:
    """Return the encoder with a newly initialised head, or unchanged without a head."""
    if head == "none":
        return part
    if head == "mlp_only_train":
        return Headed(part)
    if isinstance(part, Transformer):
        part = Pooled(part, (part.pooling,), [])
    size = part.width
    part.append({"kind": "dense", "size": size, "out": size, "bias": True, "activation": "Tanh", "residual": False})
    return part


def headless(model: SentenceModel) -> SentenceModel:
    """Return the model for evaluation and export, without a head for training."""
    if not isinstance(model.f, Headed):
        return model
    sides: Any = model.sides()
    return SentenceModel(*(side.part for side in sides), dropout=model.dropout).train(model.training)


def trained_table(words: int, width: int) -> nn.Embedding:
    """Word embeddings to be learned, uniform in [-0.1, 0.1] as in the authors' code."""
    table = nn.Embedding(words, width)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return table


def frozen_table(vectors: Tensor, known: Tensor) -> nn.Embedding:
    """Freeze word vectors (V, d). Words not `known` (V,) share one, uniform in [0, 1) as in the authors' code."""
    rows = vectors.clone()
    rows[~known] = torch.rand(vectors.shape[1])
    return nn.Embedding.from_pretrained(rows, freeze=True)


def build_transformer(c: TextSettings, vocabulary: int) -> Transformer:
    """Build a transformer from a folder, a Hub name or a config file: random weights are for `vocabulary` tokens."""
    source, weights = c.transformer, c.weights
    assert source is not None  # the caller has checked it
    place = NetworkSource(source, "text.transformer", weights)
    random = weights == "random" or (place.path is not None and not place.weight_files)

    def enlarged(config: Any) -> None:
        if not hasattr(config, "vocab_size"):
            raise place.error(f"a {config.model_type} model reads characters, not the tokens of text.tokenizer")
        if random and config.vocab_size < vocabulary:
            config.vocab_size = vocabulary
        if hasattr(config, "rescale_every"):
            config.rescale_every = 0  # RWKV would change its weights in place when it is evaluated

    built = load(place, "input_ids", enlarged)
    model, name = built.model, type(built.model).__name__
    words = model.config.vocab_size
    if words < vocabulary:
        raise ConfigError(
            f"text.transformer = {source!r} knows {words} tokens, the tokenizer has {vocabulary}. Give the tokenizer "
            f"that belongs to it"
        )
    try:
        with torch.enable_grad():
            states = model(input_ids=torch.zeros(1, 1, dtype=torch.long)).last_hidden_state
            model.config.hidden_size  # noqa: B018  (T5Gemma's has none)
    except Exception as error:  # each architecture has its own
        reason = str(error).strip().partition("\n")[0]
        fix = "Give an encoder or a decoder"
        if getattr(model.config, "is_encoder_decoder", False):
            fix = "Load its encoder with sentence-transformers and train it with dipole.text.ContrastiveLoss"
        raise place.error(f"{name} gives no states for tokens alone ({reason}). {fix}") from error
    ids = torch.arange(min(LONG, positions(model) or LONG))[None] % words
    drawn = False  # in evaluation mode, as in Reformer's hashing
    with suppress(Exception):  # too long for this architecture
        drawn = is_random(model, lambda: model(input_ids=ids).last_hidden_state)
    if drawn:
        raise place.error(f"{name} is random in evaluation mode: one sentence got two different vectors")
    fix_unused(model, states)
    fine_tune(model, c.freeze, c.lora, "text")
    part = Transformer(model, c.pooling)
    part.described, part.remarks = built.described(place), tuple(built.remarks(place))
    if _reads_padding(model):
        part.remarks += (
            f"text.transformer: {name} does not leave out padding: the vector of a sentence changes with the longest "
            "one of its batch. A model with attention masks, such as BERT, has no such noise",
        )
    return part


@torch.no_grad()
def _reads_padding(model: Any) -> bool:
    """Return whether the states of a sentence change with the padding behind it, as FNet's do."""
    ids = torch.arange(8)[None] % model.config.vocab_size
    told = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with suppress(Exception), in_mode(False, model):  # too long for this architecture
        alone = model(**told).last_hidden_state
        padded = model(**{name: nn.functional.pad(each, (0, 4)) for name, each in told.items()}).last_hidden_state
        return bool((alone - padded[:, :8]).norm() > 1e-3 * alone.norm())
    return False


@torch.no_grad()
def is_first_token_blind(model: Any) -> bool:
    """Return whether the first state of a transformer depends on its own token alone, as in decoders."""
    words = getattr(model.config, "vocab_size", 0)
    if words < 6:
        return False
    # Other words, not the same in another order: RoBERTa gives a padding token no place, and low ids can be padding.
    ids = words - torch.tensor([[1, 2, 3], [1, 4, 5]], device=next(model.parameters()).device)
    with in_mode(False, model):
        first, second = model(input_ids=ids).last_hidden_state[:, 0]
    return torch.allclose(first, second, rtol=1e-6, atol=1e-6)


def small_transformer(vocabulary: int, width: int, layers: int, heads: int, pooling: networks.Pooling) -> Transformer:
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
