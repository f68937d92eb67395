"""Data sets of the library `datasets` in streaming mode: read one image after another, without a copy on disk."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from dipole.core.utils.cache import kept_json
from dipole.core.utils.errors import DataError
from dipole.core.utils.hub import without_retry_messages
from dipole.vision.decoding import Stream
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import HUB, SHARDS, Classes, Decoding, Source
from dipole.vision.sources.huggingface import columns_of, hub_name, integers
from dipole.vision.sources.images import select_encoded, stay_encoded

MOST_SHARDS = 1024  # a set of more files is read as so many runs of files
KINDS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}
OPEN = 8  # shards that are being read


def open_stream(source: str, options: Decoding, wanted: Classes) -> Source:
    """Stream a data set of the Hub by its id, or a folder of parquet, arrow or image files.

    The number of images of each file, and their labels, are found by reading it once, and cached. With
    vision.data.length nothing is counted: the first images are one shard without labels.
    """
    if source.startswith(SHARDS):
        raise DataError(f"{source}: shards are read in place; leave vision.data.streaming out.")
    name = hub_name(source)
    path = Path(name).expanduser()
    if not source.startswith(HUB) and not path.exists() and name == source and name.count("/") != 1:
        raise DataError(f"{source!r} cannot be streamed: give hub:NAME, a Hub id owner/name or a folder of files.")
    try:
        with without_retry_messages():
            builder = _builder(path, name)
            splits = tuple(map(str, builder.info.splits or builder.config.data_files or ("train",)))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the data set {name!r} cannot be streamed ({type(error).__name__}: {str(error)[:300]}). Check the name "
            "and the connection, or give a folder of parquet or image files."
        ) from error

    def read(split: str) -> ImageSet:
        try:
            with without_retry_messages():
                table: Any = builder.as_streaming_dataset(split=split)
                return _stream(f"{name}/{split}", table, f"{builder.cache_dir}/{split}", options, wanted)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"split {split!r} of the data set {name!r} cannot be streamed: {error}.") from error

    return Source(name, splits, read)


def _builder(path: Path, name: str) -> Any:
    """Return the builder of `datasets` for a file (by its suffix), a folder (by its content) or an id."""
    from datasets import load_dataset_builder

    if path.is_file():
        kind = KINDS.get(path.suffix, "")
        if not kind:
            raise DataError(f"{path} cannot be streamed: give a folder, or a file of {', '.join(KINDS)}.")
        return load_dataset_builder(kind, data_files={"train": str(path)})
    return load_dataset_builder(str(path) if path.is_dir() else name)


def _stream(name: str, table: Any, identity: str, options: Decoding, wanted: Classes) -> ImageSet:
    from datasets import Image as ImageFeature

    if table.features is None:
        table = table._resolve_features()
    image, label, names = columns_of(name, table.features)
    if isinstance(table.features[image], ImageFeature):
        table = table.cast_column(image, ImageFeature(decode=False))
    length, shards = options.stream.length, min(table.num_shards, MOST_SHARDS)
    labels = None
    if length is None:
        key = hashlib.sha256(f"{identity}/{shards}/{image}/{label}".encode()).hexdigest()
        counted = kept_json("streams", key, lambda: _count(table, shards, image, label))
        counts = [len(each) for each in counted]
        if label is not None:
            labels = integers(name, label, [each for shard in counted for each in shard])

        def begin(shard: int) -> Iterator[Any]:
            return iter(table.shard(num_shards=shards, index=shard))
    else:
        counts = [length]

        def begin(shard: int) -> Iterator[Any]:
            return iter(table)

    if not sum(counts):
        raise DataError(f"{name} holds no images.")
    rows, labels, names = select_encoded(name, labels, names, wanted)
    bounds = [0, *accumulate(counts)]
    reader = Forward(begin, bounds, 2 * options.stream.buffer + 2048, lambda row: _bytes(row[image]), name)
    numbered = Numbered(name, bounds[-1])
    stream = Stream(torch.tensor(bounds), options.stream.buffer, forward=True)
    return stay_encoded(name, numbered, reader, labels, names, options, rows, stream)


def _count(table: Any, shards: int, image: str, label: str | None) -> list[list[Any]]:
    """Return the labels of each shard; None for each image without a label column."""
    narrow = table.select_columns([label or image])
    found = []
    for shard in range(shards):
        rows = narrow.shard(num_shards=shards, index=shard)
        found.append([None if label is None else row[label] for row in rows])
    return found


def _bytes(cell: Any) -> bytes:
    if cell["bytes"] is not None:
        return bytes(cell["bytes"])
    from datasets.utils.file_utils import xopen

    with xopen(cell["path"], "rb") as file:
        return bytes(file.read())


class Numbered(Sequence[str]):
    """Names of a stream's images: the stream's name and a number."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        return f"{self._name}[{place}]"


class Forward:
    """Rows by number from shards that can only be read from the beginning.

    The last `capacity` rows are cached, so rows that are requested nearly in order are read once. A row that left the
    cache is read again from the beginning of its shard.

    begin: a shard's number -> its rows. bounds: the first row of each shard, and the number of all rows.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterator[Any]],
        bounds: Sequence[int],
        capacity: int,
        content: Callable[[Any], bytes],
        name: str,
    ) -> None:
        self._begin, self._bounds, self._capacity, self._content = begin, torch.tensor(bounds), capacity, content
        self._name = name
        self._open: OrderedDict[int, tuple[Iterator[Any], int]] = OrderedDict()  # by shard
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()

    def __call__(self, row: int) -> bytes:
        with self._lock:
            if row not in self._held:
                self._read_to(row)
            return self._held[row]

    def _read_to(self, row: int) -> None:
        shard = int(torch.searchsorted(self._bounds, row, right=True)) - 1
        rows, place = self._open.pop(shard, (None, 0))
        if rows is None or place > row:
            rows, place = self._begin(shard), int(self._bounds[shard])
        while place <= row:
            found = next(rows, None)
            if found is None:
                raise DataError(
                    f"{self._name} ends after {place} images, and {int(self._bounds[-1])} are expected: set "
                    "vision.data.length to what it has, or leave it out."
                )
            self._held[place] = self._content(found)
            self._held.move_to_end(place)
            place += 1
            if len(self._held) > self._capacity:
                self._held.popitem(last=False)
        self._open[shard] = rows, place
        if len(self._open) > OPEN:
            self._open.popitem(last=False)
