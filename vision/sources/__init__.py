"""Sources of images: a file per kind, found by listing this folder."""

import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.download import offline_by
from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.files import is_file, is_folder
from dipole.core.utils.plugins import import_all
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import HUB, READERS, SHARDS, Classes, Decoding, Known, Reader, Source
from dipole.vision.sources.folder import FOLDER
from dipole.vision.sources.huggingface import SAVED, hub, hub_name
from dipole.vision.sources.images import CONVERT
from dipole.vision.sources.streamed import open_stream

import_all(__name__)


def reader_of(source: str) -> Reader | None:
    """Return the kind of a source, None for an unknown one or an impossible name."""
    readers = sorted(READERS.values(), key=lambda each: each.general)
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(source).expanduser()
        return next((each for each in readers if source and each.matches(source, path)), None)
    return None


def open_source(source: str, options: Decoding, wanted: Classes = None) -> Source:
    """Recognise and open a source. Nothing is decoded before a split is read. wanted: class names to keep."""
    reader = reader_of(source)
    if options.streaming:
        reader = reader_of(hub_name(source))
        if reader is None or reader.reads not in (FOLDER, SAVED):
            return open_stream(source, options, wanted)
        opened = reader.open(hub_name(source), replace(options, memory=0), wanted)

        def read(split: str) -> ImageSet:
            images = opened.reader(split)
            return images.take(torch.arange(len(images))[: options.length])

        return replace(opened, reader=read)
    if reader is None:
        if is_file(Path(source)):
            raise DataError(f"{source} is a file that dipole cannot read as images. {CONVERT}. Or give {described()}.")
        if source == "imagenet":
            raise DataError(
                f"no data at {source!r}. ImageNet is only for registered users of https://image-net.org. Unpack it to "
                "FOLDER/train/CLASS and FOLDER/val/CLASS; then add --set vision.data.source=FOLDER."
            )
        names = [name for reader in READERS.values() for name in reader.names]
        hint = "".join(map(how_to_get, Path(source).parts)) or nearest(source, names)
        raise DataError(f"no data at {source!r}.{hint} Give {described()}; a path must exist.")
    return reader.open(source, options, wanted)


def missing(source: str) -> str:
    """Return why a source cannot be read, "" if it is there or only the network can tell. Nothing is decoded."""
    if source and is_folder(Path(source).expanduser()):  # its kind is found by reading it
        return ""
    reader = reader_of(source)
    if reader is None or source.startswith(SHARDS) or (reader.open is hub and offline_by()):
        try:
            open_source(source, Decoding())
        except DataError as error:
            return str(error)
    elif reader.open is not hub and Path(source).suffix and not Path(source).expanduser().exists():
        return f"no data at {source}.{''.join(map(how_to_get, Path(source).parts))}"
    return ""  # a name without a suffix may be a plug-in's


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
    reader = reader_of(source)
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
