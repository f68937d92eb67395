"""Sources of images: a file per kind, found by listing this folder."""

from pathlib import Path

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.plugins import import_all
from dipole.vision.sources.base import (
    HELD_OUT,
    HUB,
    READERS,
    SHARDS,
    Classes,
    Decoding,
    Known,
    Reader,
    Source,
    Streaming,
    register_source,
)
from dipole.vision.sources.streamed import open_stream

__all__ = [
    "HELD_OUT",
    "SHARDS",
    "Decoding",
    "Known",
    "Source",
    "Streaming",
    "described",
    "known",
    "open_source",
    "register_source",
    "seen",
]

import_all(__name__)


def _reader(source: str) -> Reader | None:
    path = Path(source).expanduser()
    for reader in sorted(READERS.values(), key=lambda each: each.general):
        if reader.matches(source, path):
            return reader
    return None


def open_source(source: str, options: Decoding, wanted: Classes = None) -> Source:
    """Recognise and open a source. Nothing is decoded before a split is read.

    wanted: the class names to keep, in their order.
    """
    if options.stream.on:
        return open_stream(source, options, wanted)
    reader = _reader(source)
    if reader is None:
        names = [name for reader in READERS.values() for name in reader.names]
        raise DataError(f"no data at {source!r}.{nearest(source, names)} Give {described()}; a path must exist.")
    return reader.open(source, options, wanted)


def described() -> str:
    """List everything that can be read, in words."""
    names = [name for reader in READERS.values() for name in reader.names]
    return ", ".join([*names, *(reader.reads for reader in READERS.values() if reader.reads)])


def known(source: str) -> Known | None:
    """Return the sizes of a well-known data set."""
    source = source.removeprefix(HUB)
    return next((reader.known[source] for reader in READERS.values() if source in reader.known), None)


def seen(source: str) -> Known | None:
    """Return the sizes of a well-known data set, or of one that shows them without decoding images."""
    found = known(source)
    if found is not None:
        return found
    reader = _reader(source)
    if reader is None:
        return None
    return reader.glance(Path(source).expanduser())
