"""Where images come from: a file per kind of source, found by listing this folder."""

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


def open_source(source: str, options: Decoding, wanted: Classes = None) -> Source:
    """Find out what `source` names. Nothing is decoded before a split is read.

    wanted: the class names to keep, in their order.
    """
    path = Path(source).expanduser()
    if options.stream.on:
        return open_stream(source, options, wanted)
    for reader in sorted(READERS.values(), key=lambda each: each.general):
        if reader.matches(source, path):
            return reader.open(source, options, wanted)
    names = [name for reader in READERS.values() for name in reader.names]
    raise DataError(f"no data at {source!r}.{nearest(source, names)} Give {described()}; a path must exist.")


def described() -> str:
    """Everything that can be read, in words."""
    names = [name for reader in READERS.values() for name in reader.names]
    return ", ".join([*names, *(reader.reads for reader in READERS.values() if reader.reads)])


def known(source: str) -> Known | None:
    """What is known of a data set by its name, without looking for it."""
    source = source.removeprefix(HUB)
    return next((reader.known[source] for reader in READERS.values() if source in reader.known), None)


def seen(source: str) -> Known | None:
    """What is known of a data set by its name, or by a glance at what lies there."""
    path = Path(source).expanduser()
    readers = sorted(READERS.values(), key=lambda each: each.general)
    return known(source) or next((each.glance(path) for each in readers if each.matches(source, path)), None)
