"""A trained encoder for other libraries: a file per format.

A program that has imported this package knows the models with code of our own, and needs no flag to load them.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import dipole.text.portable  # noqa: F401 - makes these models known
from dipole.text.encode import SentenceEncoder


def export_as(to: str, encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write an encoder in one of the formats of `TextAdapter.export_formats` into an empty folder, card included."""
    import_module(f"{__name__}.{to.replace('-', '_')}").export(encoder, folder, record)
