"""Build the encoders of a run, clip their gradients, and expand their vocabulary."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.utils.backbone import Source, load
from dipole.core.utils.errors import DataError
from dipole.text import encoders
from dipole.text.config import TextSettings
from dipole.text.encoders.batch import Chunk
from dipole.text.encoders.build import check_first_token
from dipole.text.encoders.networks import Part, SentenceModel
from dipole.text.encoders.sentence_folder import with_modules
from dipole.text.encoders.tail import Pooled
from dipole.text.vocabulary import Tokens, expand, read_vectors, words_vocabulary


def build_model(c: TextSettings, words: int, fixed: nn.Embedding | None) -> encoders.SentenceModel:
    """Build f and g with new weights, for `words` tokens. `fixed` are word vectors that are not learned."""

    def side() -> encoders.Part:
        if c.encoder == "transformer":
            part = transformer()
            if c.rows_drop and c.dropout:
                with_dropout(part, c.dropout)
            return part
        tables = []
        if fixed is not None:
            tables.append(fixed)
        if c.channels != "fixed":
            tables.append(encoders.trained_table(words, c.word_size))
        parts = [of_words(table) for table in tables]
        if len(parts) == 1:
            return parts[0]
        return encoders.Channels(parts)

    def of_words(table: nn.Embedding) -> encoders.Part:
        if c.encoder == "bow":
            return encoders.BagOfWords(table)
        return encoders.word_gru(table, c.hidden_size, c.direction)

    def transformer() -> encoders.Transformer:
        if c.transformer is not None:
            return encoders.build_transformer(
                c.transformer, c.pooling, words, freeze=c.freeze, lora=c.lora, weights=c.weights
            )
        return encoders.small_transformer(words, c.hidden_size, c.layers, c.heads, c.pooling)

    def headed() -> encoders.Part:
        part: Any = with_modules(side(), c.transformer, c.pooling)
        if c.transformer is not None and "cls" in part.pooling:
            check_first_token(getattr(part, "part", part).model, c.transformer)
        return with_head(part, c.head)

    f, g = headed(), None
    if c.sides == 2 and c.pairs != "blocks":  # one encoder reads all members of a block, as in Arora et al.
        g = headed()
    dropout = c.dropout
    if c.rows_drop:  # the adapter draws a mask for each row, for the rows of all ranks
        dropout = 0.0
    return encoders.SentenceModel(f, g, dropout=dropout)


def with_dropout(part: encoders.Transformer, rate: float) -> None:
    """Set one rate for all dropout of a transformer: its layers, and the numbers in its attention."""
    for module in part.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, rate)
    config = part.model.config
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout"):
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, rate)


def limit_of(model: nn.Module) -> int | None:
    """Return the most tokens that the transformers of a model can read, or None."""
    inner: list[Any] = [part.model for part in model.modules() if isinstance(part, encoders.Transformer)]
    return min((found for found in map(_positions, inner) if found is not None), default=None)


def positions_of(c: TextSettings) -> int | None:
    """Return `limit_of` the transformer of the settings before it is built."""
    if c.encoder != "transformer":
        return None
    with torch.device("meta"):
        if c.transformer is None:
            return limit_of(encoders.small_transformer(1, c.hidden_size, c.layers, c.heads, c.pooling))
        return _positions(load(Source(c.transformer, "text.transformer", c.weights), "input_ids").model)


def _positions(model: Any) -> int | None:
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kind count from the position after that of padding.
            if module.padding_idx is None:
                return module.num_embeddings
            return module.num_embeddings - (module.padding_idx + 1)
    found = getattr(model.config, "max_position_embeddings", None)
    if isinstance(found, int) and found > 0:
        return found
    return None


def never_differs(model: encoders.SentenceModel, batch: encoders.Batch) -> bool:
    """Return whether a batch of two equal halves gives equal halves in training mode."""
    was = model.training
    with torch.random.fork_rng(), torch.no_grad():
        rows = model.train()(batch)[0]
    model.train(was)
    return torch.equal(*rows.chunk(2))


def fixed_table(c: TextSettings, tokens: Tokens) -> nn.Embedding | None:
    """Read the word vectors that are not learned. Return None if all are learned."""
    if c.channels == "trained":
        return None
    assert c.vectors is not None  # the configuration has checked it
    words, vectors = read_vectors(c.vectors, tokens.index)
    table = torch.zeros(len(tokens), vectors.shape[1])
    known = torch.zeros(len(tokens), dtype=torch.bool)
    rows = torch.tensor([tokens.index[word] for word in words], dtype=torch.long)
    table[rows] = torch.from_numpy(vectors)
    known[rows] = True
    if not bool(known.any()):
        raise DataError(f"{c.vectors} holds no word of the corpus {c.corpus}")
    return encoders.fixed_table(table, known)


@torch.no_grad()
def clip_each(model: nn.Module, limit: float) -> None:
    """Clip the gradient norm of each tensor separately, as the authors' code does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(limit / torch.linalg.vector_norm(parameter.grad).clamp_min(limit))


def expanded(model: encoders.SentenceModel, tokens: Tokens, path: str) -> tuple[encoders.SentenceModel, Tokens]:
    """Copy model and vocabulary and add the words of a vector file, to each trained table by its own linear map."""
    words, vectors = read_vectors(path)
    model = copy.deepcopy(model)
    old = tokens.words()
    lower = bool(tokens.tokenizer.normalizer and "Lowercase" in str(tokens.tokenizer.normalizer))
    added: list[str] = []
    for module in model.modules():
        table = getattr(module, "table", None)
        if not isinstance(table, nn.Embedding):
            continue
        if table.weight.requires_grad:
            added, rows = expand(tokens.index, table.weight.detach().numpy(), words, vectors)
        else:
            added = [w for w in words if w not in tokens.index and "_" not in w]
            place = {word: i for i, word in enumerate(words)}
            rows = vectors[[place[w] for w in added]]
        weight = torch.cat([table.weight.detach(), torch.from_numpy(np.ascontiguousarray(rows))])
        module.table = nn.Embedding.from_pretrained(weight, freeze=not table.weight.requires_grad)
    return model, words_vocabulary([*old[1:], *added], lower)


class Headed(Part):
    """An encoder with a head of its own width. Evaluation keeps it if it `stays` (supervised SimCSE)."""

    described: Mapping[str, Any] | None = None  # as of a `Transformer`
    remarks: Sequence[str] = ()

    def __init__(self, part: Part, stays: bool) -> None:
        super().__init__()
        self.part, self.stays, self.width = part, stays, part.width
        self.linear = nn.Linear(part.width, part.width)
        self.described, self.remarks = getattr(part, "described", None), getattr(part, "remarks", ())

    def forward(self, chunk: Chunk) -> Tensor:
        found: Tensor = self.part(chunk)
        if self.training or self.stays:
            return torch.tanh(self.linear(found))
        return found

    def evaluated(self) -> Part:
        """The encoder as it is in evaluation, of parts that sentence-transformers has too."""
        if not self.stays:
            return self.part
        part: Any = self.part
        before: list[dict[str, Any]] = []
        pooling: Sequence[str] = (getattr(part, "pooling", "mean"),)
        if isinstance(part, Pooled):
            part, before, pooling = part.part, part.described_layers, part.pooling
        size = self.width
        dense = {"kind": "dense", "size": size, "out": size, "bias": True, "activation": "Tanh", "residual": False}
        found = Pooled(part, pooling, [*before, dense])
        for number, layer in enumerate(getattr(self.part, "layers", ())):
            found.layers[number].load_state_dict(layer.state_dict())
        found.layers[-1].linear.load_state_dict(self.linear.state_dict())  # type: ignore[union-attr]
        found.described, found.remarks = self.described, self.remarks
        return found.to(self.linear.weight.device).train(self.training)


def with_head(part: Part, head: Literal["none", "mlp", "mlp_only_train"]) -> Part:
    """Return the encoder with a newly initialised head, or unchanged without a head."""
    if head == "none":
        return part
    return Headed(part, stays=head == "mlp")


def evaluated(model: SentenceModel) -> SentenceModel:
    """Return the model for evaluation and export, without its head unless the head stays."""
    if not isinstance(model.f, Headed):
        return model
    sides: Any = model.sides()
    return SentenceModel(*(side.evaluated() for side in sides), dropout=model.dropout).train(model.training)
