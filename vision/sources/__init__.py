"""Sources of images: a file per kind, found by listing this folder."""

import warnings
from functools import cache
from pathlib import Path

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.plugins import import_all
from dipole.vision.sources.base import HUB, READERS, Classes, Decoding, Known, Reader, Source
from dipole.vision.sources.streamed import open_stream

import_all(__name__)


def _reader(source: str) -> Reader | None:
    path = Path(source).expanduser()
    readers = sorted(READERS.values(), key=lambda each: each.general)
    return next((each for each in readers if each.matches(source, path)), None)


def open_source(source: str, options: Decoding, wanted: Classes = None) -> Source:
    """Recognise and open a source. Nothing is decoded before a split is read.

    wanted: the class names to keep, in their order.
    """
    if options.streaming:
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


@cache
def seen(source: str, size: int | None = None) -> Known | None:
    """Return the sizes of a well-known data set, or of one that can be counted quickly."""
    reader = _reader(source)
    if known(source) is not None or reader is None or not reader.quick:
        return known(source)
    try:
        opened = reader.open(source, Decoding(size, memory=0), None)
        with warnings.catch_warnings(action="ignore"):
            parts = {split: opened.read(split) for split in opened.splits}
    except (DataError, OSError):  # training will report the problem
        return None
    classes = max((int(part.labels.max()) + 1 for part in parts.values() if part.labels is not None), default=1)
    unlabelled = frozenset(split for split, part in parts.items() if part.labels is None)
    first = next(iter(parts.values()))
    counts = {split: len(part) for split, part in parts.items()}
    return Known(first.channels, min(first.images.shape[-2:]), classes, counts, unlabelled)
