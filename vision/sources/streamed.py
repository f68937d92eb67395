"""Data sets of the library `datasets` in streaming mode: read one image after another, without a copy on disk."""

import hashlib
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dipole.core.utils.cache import kept_json
from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import as_stored, loaded
from dipole.vision.decoding import Stream
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import HUB, SHARDS, Classes, Decoding, Source, by_split
from dipole.vision.sources.huggingface import hub_name, image_bytes, image_column, read_labels, tables_in
from dipole.vision.sources.images import decode_all, select
from dipole.vision.sources.labels import plain_label

MOST_SHARDS = 1024  # a set of more files is read as so many runs of files
FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "json", ".json": "json"}
OPEN = 8  # shards that are being read


def open_stream(source: str, options: Decoding, wanted: Classes) -> Source:
    """Stream an id of the Hub, or a folder. Images are counted by reading it once, unless vision.data.length is set."""
    if source.startswith(SHARDS):
        raise DataError(f"{source}: shards are read in place. Leave vision.data.streaming out.")
    name = hub_name(source)
    path = Path(name).expanduser()
    if not source.startswith(HUB) and not path.exists() and name == source and name.count("/") != 1:
        raise DataError(f"{source!r} cannot be streamed: give hub:NAME, a Hub id owner/name or a folder of files.")
    builder = loaded(
        f"the data set {name!r} cannot be streamed ({{kind}}: {{error}}). Check the name and the connection, or give a "
        "folder of parquet or image files.",
        lambda: _builder(path, name, source.startswith(HUB)),
    )

    def read(split: str) -> ImageSet:
        failure = f"split {split!r} of the data set {name!r} cannot be streamed: {{error}}."
        images = loaded(failure, lambda: _stream(f"{name}/{split}", builder, split, options))
        return select(images, wanted)

    return Source(name, tuple(map(str, builder.info.splits or builder.config.data_files or ("train",))), read, True)


def _builder(path: Path, name: str, is_hub: bool) -> Any:
    """Return the builder of `datasets` for a file (by its suffix), a folder (by its content) or an id."""
    from datasets import load_dataset_builder

    if path.is_file():
        if path.suffix not in FORMATS:
            raise DataError(f"{path} cannot be streamed: give a folder, or a file of {', '.join(FORMATS)}.")
        return load_dataset_builder(FORMATS[path.suffix], data_files={"train": str(path)})
    if not is_hub and (tables := by_split(sorted(tables_in(path)))):
        files = {re.sub(r"\W", "_", split): list(map(str, each)) for split, each in tables.items()}
        return load_dataset_builder("parquet", data_files=files)
    return load_dataset_builder(str(path) if path.is_dir() else name)


def _stream(name: str, builder: Any, split: str, options: Decoding) -> ImageSet:
    table: Any = builder.as_streaming_dataset(split=split)
    if table.features is None:
        table = table._resolve_features()
    table, image = as_stored(table), image_column(name, table.features, options.image_column)
    shards, counts = 1, [options.length or 0]
    labels: Tensor | None = None
    names: tuple[str, ...] = ()
    if options.length is None:
        shards = min(table.num_shards, MOST_SHARDS)

        def told(label: str | None) -> list[list[Any]]:
            identity = f"{builder.cache_dir}/{split}/{shards}/{image}/{label}"
            key = hashlib.sha256(identity.encode()).hexdigest()
            return kept_json("streams", key, lambda: _count(table, shards, image, label))

        labels, names, column = read_labels(
            name, table.features, lambda label: (each for shard in told(label) for each in shard), options.label_column
        )
        counts = [len(each) for each in told(column)]
    if not sum(counts):
        raise DataError(f"{name} holds no images.")

    def begin(shard: int) -> Iterator[Any]:
        return iter(table if options.length is not None else table.shard(num_shards=shards, index=shard))

    bounds = [0, *accumulate(counts)]
    reader = Forward(begin, bounds, 2 * options.buffer + 2048, lambda row: image_bytes(row[image], fetched), name)
    stream = Stream(torch.tensor(bounds), options.buffer, forward=True)
    return decode_all(name, Numbered(name, bounds[-1]), reader, labels, names, options, stream=stream)


def _count(table: Any, shards: int, image: str, label: str | None) -> list[list[Any]]:
    """Return the labels of each shard. They are None without a label column."""
    narrow = table.select_columns([label or image])
    parts = (narrow.shard(num_shards=shards, index=shard) for shard in range(shards))
    return [[None if label is None else plain_label(row[label]) for row in part] for part in parts]


def fetched(path: str) -> bytes:
    """Return the bytes of a file of a data set on the Hub."""
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        return bytes(file.read())


@dataclass(frozen=True, eq=False)
class Numbered(Sequence[str]):
    """Names of a stream's images: the stream's name and a number."""

    name: str
    total: int

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, place: Any) -> Any:
        return f"{self.name}[{place}]"


@dataclass(eq=False)
class Forward:
    """Rows by number from shards that can only be read from the beginning. The last `capacity` rows are cached."""

    begin: Callable[[int], Iterator[Any]]  # of a shard
    bounds: list[int]  # the first row of each shard, and the number of all rows
    capacity: int
    content: Callable[[Any], bytes]  # of a row
    name: str
    _open: OrderedDict[int, tuple[Iterator[Any], int]] = field(default_factory=OrderedDict)  # by shard
    _held: OrderedDict[int, bytes | Exception] = field(default_factory=OrderedDict)
    _lock: Any = field(default_factory=Lock)

    def __call__(self, row: int) -> bytes:
        with self._lock:
            if row not in self._held:
                self._read_to(row)
            held = self._held[row]
        if isinstance(held, Exception):
            raise held
        return held

    def _read_to(self, row: int) -> None:
        shard = bisect_right(self.bounds, row) - 1
        rows, place = self._open.pop(shard, (None, 0))
        if rows is None or place > row:
            rows, place = self.begin(shard), self.bounds[shard]
        while place <= row:
            found = next(rows, None)
            if found is None:
                raise DataError(
                    f"{self.name} ends after {place} images, and {self.bounds[-1]} are expected: set "
                    "vision.data.length to what it has, or leave it out."
                )
            try:
                self._held[place] = self.content(found)
            except Exception as error:  # raised for this image only, when it is asked for
                self._held[place] = error
            self._held.move_to_end(place)
            place += 1
            if len(self._held) > self.capacity:
                self._held.popitem(last=False)
        self._open[shard] = rows, place
        if len(self._open) > OPEN:
            self._open.popitem(last=False)
