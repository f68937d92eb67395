"""Encoders of sentences: the networks, and the model of transformers that exports hold."""

from dipole.text.encoders.batch import Chunk, TokenBatch
from dipole.text.encoders.networks import (
    BagOfWords,
    Channels,
    Direction,
    Encoder,
    Projected,
    SentenceModel,
    Transformer,
    WordGRU,
    architecture,
    from_architecture,
    parameter_count,
)

__all__ = [
    "BagOfWords",
    "Channels",
    "Chunk",
    "Direction",
    "Encoder",
    "Projected",
    "SentenceModel",
    "TokenBatch",
    "Transformer",
    "WordGRU",
    "architecture",
    "from_architecture",
    "parameter_count",
]  # fmt: skip
