"""A corpus as ids: in memory, or in resumable shards of a cache folder that one process fills at a time."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from dipole.core.ground.errors import DataError
from dipole.core.ground.files import atomic_file, atomic_write, why
from dipole.text.corpus import Document
from dipole.text.vocabulary import Tokens

SHARD = 1_000_000  # sentences


@dataclass(frozen=True)
class Sentences:
    """Sentences as ids: the tokens of sentence i are `tokens[offsets[i]:offsets[i + 1]]`; arrays may be memory maps."""

    tokens: np.ndarray  # (T,) int32
    offsets: np.ndarray  # (n + 1,) int64
    document: np.ndarray  # (n,) int32, rising

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Token ids of some sentences."""
        return [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in rows]

    def take(self, rows: np.ndarray) -> "Sentences":
        """Some sentences alone, in memory."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.concatenate(self.ids(rows)) if len(rows) else self.tokens[:0]
        return Sentences(np.asarray(tokens), offsets, np.asarray(self.document[rows]))

    @property
    def fingerprint(self) -> str:
        """Content hash of tokens and boundaries."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.offsets, self.document):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def encode_documents(
    documents: Iterable[Document],
    tokens: Tokens,
    max_length: int,
    folder: Path | None = None,
    shard: int = SHARD,
) -> Sentences:
    """Turn documents into ids, in memory or in shards on disk.

    Args:
        documents: in a fixed order.
        max_length: longer sentences are cut after this many tokens.
        folder: where shards go; a finished one is never made again, so an interrupted call goes on where it stopped.
        shard: sentences per shard (a document is never divided).

    Raises:
        DataError: no sentence was found.
    """
    index = _read_index(folder)
    done = index["shards"]
    consumed, count = sum(s["documents"] for s in done), sum(s["documents"] for s in done)
    parts: list[list[int]] = []
    owners: list[int] = []

    def flush(documents_done: int) -> None:
        nonlocal parts, owners
        arrays: dict[str, Any] = _pack(parts, owners)
        if folder is not None:
            name = f"{len(done):05d}.npz"
            with _writing(folder), atomic_file(folder / name) as file:
                np.savez(file, **arrays)
            done.append({"file": name, "documents": documents_done, "sentences": len(owners)})
            keep(folder / "index.json", json.dumps(index))
        else:
            done.append(arrays)
        parts, owners = [], []

    if not index["complete"]:
        since = 0
        for document in islice(documents, consumed, None):
            parts += tokens.encode(document.sentences, max_length)
            owners += [count] * len(document.sentences)
            count += 1
            since += 1
            if len(owners) >= shard:
                flush(since)
                since = 0
        if since:
            flush(since)
        index["complete"] = True
        if folder is not None:
            keep(folder / "index.json", json.dumps(index))
    loaded = [_load_shard(folder, s) for s in done]
    if not sum(len(part["document"]) for part in loaded):
        raise DataError("the corpus holds no sentence")
    return _join(loaded)


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Hold a cache folder alone while it is filled: whoever comes meanwhile waits, and then finds it full.

    A full one is read without a lock, so that it may lie where nothing can be written.

    Raises:
        DataError: the folder cannot be written.
    """
    if (folder / "index.json").is_file() and _read_index(folder)["complete"]:
        yield
        return
    lock = FileLock(folder / ".lock")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def keep(path: Path, content: str) -> None:
    """Write a file of a cache folder, whole or not at all; raises DataError where the disk does not take it."""
    with _writing(path.parent):
        atomic_write(path, content)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"the corpus cannot be kept in {folder}: {why(error)} Or leave text.cache out.") from error


def _read_index(folder: Path | None) -> dict[str, Any]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "index.json").is_file():
            return json.loads((folder / "index.json").read_text())
    return {"shards": [], "complete": False}


def _pack(parts: list[list[int]], owners: list[int]) -> dict[str, np.ndarray]:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    flat = np.fromiter((i for part in parts for i in part), dtype=np.int32, count=int(offsets[-1]))
    return {"tokens": flat, "offsets": offsets, "document": np.array(owners, dtype=np.int32)}


def _load_shard(folder: Path | None, shard: dict[str, Any]) -> dict[str, np.ndarray]:
    if folder is None:
        return shard
    try:
        with np.load(folder / shard["file"]) as file:
            return dict(file)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the shard {folder / shard['file']} is damaged ({error}); delete {folder} to make it anew"
        ) from error


def _join(parts: list[dict[str, np.ndarray]]) -> Sentences:
    if len(parts) == 1:
        return Sentences(**parts[0])
    starts = np.cumsum([0, *(len(part["tokens"]) for part in parts)])
    offsets = [part["offsets"][:-1] + start for part, start in zip(parts, starts, strict=False)]
    return Sentences(
        np.concatenate([part["tokens"] for part in parts]),
        np.concatenate([*offsets, starts[-1:]]),
        np.concatenate([part["document"] for part in parts]),
    )
