"""Encoders of sentences: the networks, how new ones are built, and the model of transformers that exports hold."""

from dipole.text.encoders.batch import Batch, Chunk
from dipole.text.encoders.build import build_transformer, fixed_table, small_transformer, trained_table, word_gru
from dipole.text.encoders.networks import (
    BagOfWords,
    Channels,
    Direction,
    Part,
    Projected,
    SentenceModel,
    Transformer,
    WordGRU,
    architecture,
    from_architecture,
    parameter_count,
)

__all__ = [
    "BagOfWords", "Batch", "Channels", "Chunk", "Direction", "Part", "Projected", "SentenceModel",
    "Transformer", "WordGRU", "architecture", "build_transformer", "fixed_table", "from_architecture",
    "parameter_count", "small_transformer", "trained_table", "word_gru",
]  # fmt: skip
