"""A trained encoder for other libraries: a file per format.

A program that has imported this package knows the models with code of our own, and needs no flag to load them.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.modeling_dipole import DipoleSentenceConfig, DipoleSentenceModel
from dipole.text.export.sentence_transformers import export_sentence_transformer
from dipole.text.portable import fast_tokenizer, projected

__all__ = [
    "DipoleSentenceConfig", "DipoleSentenceModel", "export_as", "export_sentence_transformer", "fast_tokenizer",
    "projected",
]  # fmt: skip


def export_as(to: str, encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write an encoder in one of the formats of `TextAdapter.export_formats` into an empty folder, card included."""
    import_module(f"{__name__}.{to.replace('-', '_')}").export(encoder, folder, record)
