"""Sentence encoders: recurrent, bag-of-words and transformer, one for the sentence (f) and one for its context (g).

An exported folder holds a copy of this file and of those it imports: they import torch, each other, and nothing else of
dipole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from .batch import Chunk, TokenBatch

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
Direction = Literal["uni", "bi", "combine"]
Pooling = Literal["mean", "cls", "lasttoken"]
# Models of transformers in which each token attends to all others in every layer.
ATTEND_EVERYWHERE = ("albert", "bert", "camembert", "distilbert", "electra", "ernie", "roberta", "xlm-roberta")
MASKS_BY_ID = ("flaubert", "xlm")  # those that leave out every token with the id of padding, unless they get a mask


class Encoder(nn.Module):
    """An encoder of one side: a chunk of token ids to vectors (b, width)."""

    width: int

    def vectors(self, batch: TokenBatch) -> Tensor:
        """Return the vectors (B, width) of a batch in its order."""
        return torch.cat([self(chunk) for chunk in batch.chunks])[batch.order]


class WordGRU(Encoder):
    """Final state of a GRU over word embeddings. "bi" joins two of half the width, "combine" uni and bi of the width.

    It follows the Quick-Thought code (`s2v_model.py`) except for the cell, so weights cannot be exchanged: TensorFlow's
    applies the reset gate before the recurrent product and starts with gate bias 1, PyTorch's with uniform biases.
    """

    table: nn.Embedding

    def __init__(self, table: nn.Embedding, width: int, direction: Direction) -> None:
        super().__init__()
        self.table = table
        sides = {"uni": [False], "bi": [True], "combine": [False, True]}[direction]
        self.recurrent = nn.ModuleList(
            nn.GRU(table.embedding_dim, width // 2 if both else width, bidirectional=both) for both in sides
        )
        self.units, self.direction = width, direction
        self.width = width * len(sides)

    def forward(self, chunk: Chunk) -> Tensor:
        packed = pack_padded_sequence(chunk.ids, chunk.lengths, batch_first=True)
        words = self.table(packed.data)  # nothing is looked up for padding
        states = [gru(PackedSequence(words, packed.batch_sizes))[1] for gru in self.recurrent]  # (directions, b, units)
        return torch.cat([side for state in states for side in state], 1)


class BagOfWords(Encoder):
    """Sum of word embeddings (the Quick-Thought code sums, it does not average)."""

    table: nn.Embedding

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.width = table.embedding_dim

    def forward(self, chunk: Chunk) -> Tensor:
        weights = chunk.mask().to(self.table.weight.dtype)
        return nn.functional.embedding_bag(chunk.ids, self.table.weight, mode="sum", per_sample_weights=weights)


def pooled(hidden: Tensor, mask: Tensor, mode: str) -> Tensor:
    """States (b, T, d) of tokens, True in mask (b, T) and first in their row, as one vector each, (b, d)."""
    weight = mask.to(hidden.dtype)
    match mode:
        case "cls":
            return hidden[:, 0]
        case "max":
            return hidden.masked_fill(~mask[..., None], -torch.inf).amax(1)
        case "lasttoken":
            last = mask.sum(1) - 1
            return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        case "mean_sqrt_len_tokens":
            return torch.bmm(weight[:, None], hidden)[:, 0] / weight.sum(1, keepdim=True).sqrt()
        case "weightedmean":
            weight = weight * torch.arange(1, weight.shape[1] + 1, device=weight.device)
    return torch.bmm(weight[:, None], hidden)[:, 0] / weight.sum(1, keepdim=True)


def takes_whole_mask(config: Any) -> bool:
    """Return whether a mask (b, 1, T, T) may replace the model's own, which is none of a decoder or sliding window."""
    everywhere = config.model_type in ATTEND_EVERYWHERE and not getattr(config, "is_decoder", False)
    return everywhere and config._attn_implementation == "sdpa"


class Transformer(Encoder):
    """Any Hugging Face encoder, pooled over its tokens ("mean") or at its first ("cls") or last one ("lasttoken")."""

    model: Any  # its attributes are transformers' own
    described: Mapping[str, Any] | None = None  # where its weights come from, for the record
    remarks: Sequence[str] = ()  # notes on them for the user

    def __init__(self, model: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.width = int(self.model.config.hidden_size)

    def forward(self, chunk: Chunk) -> Tensor:
        return pooled(self.states(chunk), chunk.mask(), self.pooling)

    def states(self, chunk: Chunk) -> Tensor:
        """States (b, T, width) of the tokens."""
        mask = chunk.mask()
        # A chunk without padding needs no mask, and attention without one is faster.
        attended = None
        if int(chunk.lengths[-1]) < chunk.ids.shape[1] or self.model.config.model_type in MASKS_BY_ID:
            attended = mask.long()
            if mask.device.type != "cpu" and takes_whole_mask(self.model.config):
                # Of a mask of one row for each sentence, transformers asks the device whether it is all ones.
                attended = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        states: Tensor = self.model(input_ids=chunk.ids, attention_mask=attended).last_hidden_state
        return states


class Channels(Encoder):
    """Several encoders of one sentence side by side (MultiChannel: fixed and trained word vectors)."""

    def __init__(self, parts: Sequence[Encoder]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.width = sum(part.width for part in parts)

    def forward(self, chunk: Chunk) -> Tensor:
        return torch.cat([part(chunk) for part in self.parts], 1)


class Projected(Encoder):
    """An encoder followed by a square linear map, such as CLLR's L: the representation that is used downstream."""

    def __init__(self, part: Encoder, matrix: Tensor) -> None:
        super().__init__()
        self.part = part
        self.matrix = nn.Parameter(matrix.detach().clone(), requires_grad=False)  # (d, d), applied as x @ matrix
        self.width = matrix.shape[1]

    def forward(self, chunk: Chunk) -> Tensor:
        return self.part(chunk) @ self.matrix


class Dense(nn.Module):
    """A linear map with an activation, with a residual connection if `residual` is True."""

    def __init__(self, size: int, out: int, bias: bool, activation: str, residual: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(size, out, bias=bias)
        self.activation_function = getattr(nn, activation)()  # the library's name
        self.residual: nn.Module | None = None
        if residual:
            self.residual = nn.Identity() if size == out else nn.Linear(size, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.activation_function(self.linear(x))
        if self.residual is not None:
            found = found + self.residual(x)
        return found


class Unit(nn.Module):
    """Scales to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "dense": Dense,
    "layer_norm": lambda size: nn.LayerNorm(size),
    "dropout": nn.Dropout,
    "normalize": Unit,
}
"""Kinds of layers of `Pooled`."""


class Pooled(Encoder):
    """A transformer whose tokens are pooled in one or several ways, side by side, and passed through layers.

    `pooling` are names in `POOLING`, `layers` kinds in `LAYERS` with their arguments. The transformer's own pooling is
    not used. `similarity` compares the vectors in sentence-transformers, by default "cosine".
    """

    def __init__(
        self, part: Transformer, pooling: Sequence[str], layers: Sequence[Mapping[str, Any]], similarity: str = "cosine"
    ) -> None:
        super().__init__()
        self.part, self.similarity = part, similarity
        self.described, self.remarks = part.described, part.remarks
        self.pooling = tuple(pooling)
        self.described_layers: list[dict[str, Any]] = []
        self.layers = nn.Sequential()
        self.width = part.width * len(self.pooling)
        for each in layers:
            self.append(each)

    def append(self, described: Mapping[str, Any]) -> None:
        self.described_layers.append(dict(described))
        options = dict(described)
        build = LAYERS[options.pop("kind")]
        self.layers.append(build(**options))
        self.width = int(described.get("out", self.width))

    def forward(self, chunk: Chunk) -> Tensor:
        hidden, mask = self.part.states(chunk), chunk.mask()
        found: Tensor = self.layers(torch.cat([pooled(hidden, mask, mode) for mode in self.pooling], 1))
        return found


class SentenceModel(nn.Module):
    """f and g, which share no weights except fixed word vectors. g is None if one encoder does both."""

    f: Encoder
    g: Encoder | None

    def __init__(self, f: Encoder, g: Encoder | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.f, self.g, self.dropout = f, g, dropout
        self.width = f.width
        self.halves = len(self.sides())  # equal parts of `represent` that the authors scale to unit length one by one
        self.output_width = sum(side.width for side in self.sides())

    def sides(self) -> list[Encoder]:
        """Return the encoders, f and g or f alone."""
        return [side for side in (self.f, self.g) if side is not None]

    def forward(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Embeddings (B, d) of the sentences by f and by g, in the order of the batch."""
        f = g = self.f.vectors(batch)
        if self.g is not None:
            g = self.g.vectors(batch)
        if self.training and self.dropout:
            # As in the authors' code: one mask of the width for the whole batch and both sides, without rescaling.
            kept = torch.rand(1, self.width, device=f.device) >= self.dropout
            return f * kept, g * kept
        return f, g

    def represent(self, batch: TokenBatch) -> Tensor:
        """Return [f(s), g(s)], (B, output_width), for evaluation and export."""
        return torch.cat(self(batch)[: self.halves], 1)


def architecture(module: nn.Module) -> dict[str, Any]:
    """Return JSON values from which `from_architecture` builds an encoder of the same shape."""
    match module:
        case SentenceModel():
            sides = [architecture(side) for side in module.sides()]
            return {"kind": "sentence", "sides": sides, "dropout": module.dropout}
        case WordGRU():
            return {"kind": "gru", "units": module.units, "direction": module.direction, **_shape(module.table)}
        case BagOfWords():
            return {"kind": "bow", **_shape(module.table)}
        case Channels():
            return {"kind": "channels", "parts": [architecture(part) for part in module.parts]}
        case Projected():
            return {"kind": "projected", "part": architecture(module.part), "width": module.width}
        case Pooled():
            layers = module.described_layers
            return {"kind": "pooled", "part": architecture(module.part), "pooling": module.pooling, "layers": layers}
        case Transformer():
            pooler = getattr(module.model, "pooler", None) is not None
            config = module.model.config.to_dict() | {"_name_or_path": ""}  # no path of this machine
            found = {"kind": "transformer", "config": config, "pooling": module.pooling, "pooler": pooler}
            if (name := type(module.model).__name__).endswith("EncoderModel"):  # of T5 and its kind
                found["model"] = name
            return found
    raise TypeError(type(module).__name__)


def _shape(table: nn.Embedding) -> dict[str, int]:
    return {"words": table.num_embeddings, "size": table.embedding_dim}


def from_architecture(a: dict[str, Any]) -> Any:
    """Build an encoder, with weights to be loaded, from what `architecture` returned."""
    match a["kind"]:
        case "sentence":
            return SentenceModel(*map(from_architecture, a["sides"]), dropout=a["dropout"])
        case "gru":
            return WordGRU(nn.Embedding(a["words"], a["size"]), a["units"], a["direction"])
        case "bow":
            return BagOfWords(nn.Embedding(a["words"], a["size"]))
        case "channels":
            return Channels([from_architecture(part) for part in a["parts"]])
        case "projected":
            return Projected(from_architecture(a["part"]), torch.eye(a["width"]))
        case "pooled":
            return Pooled(from_architecture(a["part"]), a["pooling"], a["layers"])
        case "transformer":
            import transformers

            config = dict(a["config"])
            make: Any = getattr(transformers, a["model"]) if "model" in a else transformers.AutoModel.from_config
            model = make(transformers.AutoConfig.for_model(config.pop("model_type"), **config))
            if not a["pooler"] and hasattr(model, "pooler"):
                model.pooler = None
            return Transformer(model, a["pooling"])
    raise ValueError(f"unknown kind of encoder {a['kind']!r}")
