"""A corpus as ids: in memory, or in files of a cache folder that are mapped, not read, and that one process fills."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.utils.cache import found, sum_of
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_file, atomic_write, remove_scratch, why
from dipole.text.corpus import Document, Piece
from dipole.text.counting import Counts
from dipole.text.filled_folder import INDEX, TOKENIZER, building, index_of, is_summed, writing
from dipole.text.shard_worker import file_of, made_by
from dipole.text.shards import SHARD, Numbering, Shard, Task, tasks_of
from dipole.text.vocabulary import Tokens, counted_vocabulary, load_tokens
from dipole.text.watch import Watch

ARRAYS = {"tokens": np.int32, "offsets": np.int64, "document": np.int32}
PARTS = "parts"
TOLD = ("fingerprint", "longest", "unknown")
READ = 1 << 20  # numbers that are looked at together
Told = Callable[[int, int], None]
"""Is told the characters and the sentences of each shard that is done."""


@dataclass(frozen=True)
class Sentences:
    """Sentences as ids: the tokens of sentence i are `tokens[offsets[i]:offsets[i + 1]]`; arrays may be memory maps."""

    tokens: np.ndarray  # (T,) int32
    offsets: np.ndarray  # (n + 1,) int64
    document: np.ndarray  # (n,) int32, rising
    told: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What is known of them without looking at all of them (`TOLD`)."""
    watch: Watch | None = field(default=None, compare=False, repr=False)
    """Looks whether the files are intact."""

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Tokens of the longest sentence."""
        found = self.told.get("longest")
        return int(self.lengths.max(initial=0)) if found is None else int(found)

    @property
    def unknown(self) -> int:
        """How many tokens are id 0."""
        found = self.told.get("unknown")
        return sum(int((part == 0).sum()) for part in _parts(self.tokens)) if found is None else int(found)

    @property
    def starts(self) -> np.ndarray:
        """(documents + 1,) the first sentence of each document that has one, and the number of sentences."""
        changes = []
        for place in range(0, len(self) - 1, READ):
            part = self.document[place : place + READ + 1]
            changes.append(place + 1 + np.flatnonzero(part[:-1] != part[1:]))
        return np.concatenate([[0], *changes, [len(self)]]).astype(np.int64)

    def has_neighbours(self, rows: np.ndarray) -> bool:
        """Whether two of some sentences, one behind the other, are of one document."""
        places = range(0, len(rows) - 1, READ)
        parts = (self.document[rows[place : place + READ + 1]] for place in places)
        return any(bool((part[:-1] == part[1:]).any()) for part in parts)

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Token ids of some sentences.

        Raises:
            DataError: the files that they lie in were found to be damaged.
        """
        if self.watch is not None:
            self.watch.check()
        return [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in rows]

    def take(self, rows: np.ndarray) -> "Sentences":
        """Some sentences alone, in memory."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.concatenate(self.ids(rows)) if len(rows) else self.tokens[:0]
        return Sentences(np.asarray(tokens), offsets, np.asarray(self.document[rows]))

    @property
    def fingerprint(self) -> str:
        """Content hash of tokens and boundaries."""
        if "fingerprint" not in self.told:
            digest = hashlib.sha256()
            for array in (self.tokens, self.offsets, self.document):
                for part in _parts(array):
                    digest.update(np.ascontiguousarray(part).data)
            self.told["fingerprint"] = digest.hexdigest()[:16]
        return str(self.told["fingerprint"])


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + READ] for start in range(0, len(array), READ))


def encode_documents(
    documents: Iterable[Document],
    tokens: Tokens,
    max_length: int,
    folder: Path | None = None,
    size: int = SHARD,
) -> Sentences:
    """Turn documents into ids, in memory or in files.

    Args:
        documents: in a fixed order.
        max_length: longer sentences are cut after this many tokens.
        folder: where the ids are kept; an interrupted call goes on where it stopped.
        size: characters of a shard.

    Raises:
        DataError: no sentence was found.
    """
    pieces = (Piece(document.name, True, document.sentences) for document in documents)
    return encode_pieces(pieces, Numbering(max_length, tokens=tokens, verbatim=True), folder=folder, size=size)[1]


def encode_pieces(
    pieces: Iterable[Piece],
    numbering: Numbering,
    *,
    vocabulary_size: int = 50_000,
    limit: int | None = None,
    folder: Path | None = None,
    processes: int = 1,
    size: int = SHARD,
    tell: Told | None = None,
    same: Callable[[], bool] = lambda: True,
) -> tuple[Tokens, Sentences]:
    """Cut a stream of text into sentences, count its words where there is no tokenizer, and number them.

    The text is read once, and no more of it is held than the shards that are being made. Each shard is a file as soon
    as it is done, so that an interrupted call goes on behind it; all together become three arrays that are mapped. The
    vocabulary is exact: words are counted shard by shard and merged on the disk where they are many. Neither depends
    on the number of processes.

    Args:
        pieces: in a fixed order; they are not asked for where the folder is full.
        numbering: the tokenizer, or how words are told apart.
        vocabulary_size: most frequent words that are kept.
        limit: use the first sentences only.
        folder: where the ids are kept; None keeps them in memory.
        processes: that cut and number, where there is a folder and more than one shard.
        size: characters of a shard.
        same: whether the text is still what the folder is named by; asked once it is read.

    Returns:
        the tokenizer, which was given or counted, and the sentences.

    Raises:
        DataError: no sentence was found, the folder cannot be written, or the text was changed meanwhile.
    """
    pieces = _read(pieces)
    if folder is None:
        shards: list[Shard] = []
        for _ in _made(tasks_of(pieces, size), numbering, limit, shards, 1, tell):
            pass
        tokens = numbering.tokens or _vocabulary(shards, vocabulary_size, numbering.lower, None)
        ready = [_with_ids(shard, tokens) for shard in shards]
        if not sum(len(shard.lengths) for shard in ready):
            raise DataError("the corpus holds no sentence")
        flat, lengths, document = (np.concatenate(each) for each in zip(*(s.arrays for s in ready), strict=True))
        return tokens, Sentences(flat, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), document)
    full = found(partial(_load, folder, numbering.tokens))
    if full is not None:
        return full
    with building(folder):
        full = found(partial(_load, folder, numbering.tokens))
        if full is not None:
            return full
        with writing(folder):
            return _fill(folder, pieces, numbering, vocabulary_size, limit, processes, size, tell, same)


def _read(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces; a file that went away under its reader is no fault of the folder for the ids."""
    try:
        yield from pieces
    except OSError as error:
        raise DataError(f"the corpus cannot be read: {error.filename or ''} {why(error)}") from error


def _made(
    tasks: Iterable[Task],
    numbering: Numbering,
    limit: int | None,
    into: list[Shard] | Path,
    processes: int,
    tell: Told | None,
) -> Iterator[Task]:
    """Have the shards of tasks made, in this process or in others, until there are enough sentences.

    They are put into a list, or a folder, where those of an earlier call are taken as they are.
    """
    tasks = iter(tasks)
    first = list(islice(tasks, 2))
    together = chain(first, tasks)
    if isinstance(into, Path) and processes > 1 and len(first) > 1:
        done = made_by(processes, numbering, into, together, partial(_there, into))
    else:
        done = _one_by_one(together, numbering, limit, into)
    sentences = 0
    for task, count in done:
        if limit is not None and sentences + count > limit:
            shard = numbering.shard(replace(task, most=limit - sentences))
            count = limit - sentences
            assert isinstance(into, Path)  # in memory no shard is larger than it may be
            shard.save(file_of(into, task.number))
        sentences += count
        if tell is not None:
            tell(task.characters, sentences)
        yield task
        if limit is not None and sentences >= limit:
            return


def _one_by_one(
    tasks: Iterable[Task], numbering: Numbering, limit: int | None, into: list[Shard] | Path
) -> Iterator[tuple[Task, int]]:
    left = limit
    for task in tasks:
        count = _there(into, task) if isinstance(into, Path) else None
        if count is None or (left is not None and count > left):
            shard = numbering.shard(replace(task, most=left))
            shard.save(file_of(into, task.number)) if isinstance(into, Path) else into.append(shard)
            count = len(shard.lengths)
        left = None if left is None else left - count
        yield task, count


def _there(folder: Path, task: Task) -> int | None:
    """The sentences of a shard that was finished earlier, by a process that was interrupted later."""
    shard = found(partial(Shard.load, file_of(folder, task.number)))
    return None if shard is None else len(shard.lengths)


def _vocabulary(shards: Iterable[Shard], size: int, lower: bool, folder: Path | None) -> Tokens:
    with Counts(folder) as counts:
        for shard in shards:
            assert shard.counts is not None
            counts.add(shard.words, shard.counts)
        return counted_vocabulary(counts.items(), size, lower)


def _with_ids(shard: Shard, tokens: Tokens) -> Shard:
    """A shard whose tokens are ids, and no longer places in its own words."""
    if shard.counts is None:
        return shard
    ids = np.array([*(tokens.index.get(word, 0) for word in shard.words), tokens.empty], dtype=np.int32)
    return Shard(ids[shard.tokens], shard.lengths, shard.document)


# Files -----------------------------------------------------------------------------------------------------------


def _fill(
    folder: Path,
    pieces: Iterable[Piece],
    numbering: Numbering,
    vocabulary_size: int,
    limit: int | None,
    processes: int,
    size: int,
    tell: Told | None,
    same: Callable[[], bool],
) -> tuple[Tokens, Sentences]:
    parts = folder / PARTS
    parts.mkdir(parents=True, exist_ok=True)
    remove_scratch(folder)  # of a process that was killed; whoever fills the folder is alone
    numbers = [task.number for task in _made(tasks_of(pieces, size), numbering, limit, parts, processes, tell)]
    if not same():
        shutil.rmtree(parts, ignore_errors=True)
        raise DataError(
            "the corpus was changed while it was read, and nothing of it is kept. Start again when it is whole."
        )
    shards = [file_of(parts, number) for number in numbers]
    tokens = numbering.tokens
    if tokens is None:
        tokens = _vocabulary(map(Shard.load, shards), vocabulary_size, numbering.lower, parts)
        atomic_write(folder / TOKENIZER, tokens.tokenizer.to_str(pretty=True))
    told = {"sentences": 0, "tokens": 0, "longest": 0, "unknown": 0}
    with (
        atomic_file(folder / "tokens.bin") as flat,
        atomic_file(folder / "offsets.bin") as offsets,
        atomic_file(folder / "document.bin") as documents,
    ):
        offsets.write(np.zeros(1, np.int64).tobytes())
        for path in shards:
            shard = _with_ids(Shard.load(path), tokens)
            flat.write(shard.tokens.data)
            offsets.write((told["tokens"] + np.cumsum(shard.lengths, dtype=np.int64)).data)
            documents.write(shard.document.data)
            told["sentences"] += len(shard.lengths)
            told["tokens"] += len(shard.tokens)
            told["longest"] = max(told["longest"], int(shard.lengths.max(initial=0)))
            told["unknown"] += int((shard.tokens == 0).sum())
        if not told["sentences"]:
            raise DataError("the corpus holds no sentence")
    files = [f"{name}.bin" for name in ARRAYS] + ([TOKENIZER] if numbering.tokens is None else [])
    index = {**told, "files": {name: sum_of(folder / name) for name in files}}
    index["fingerprint"] = _mapped(folder, {}).fingerprint
    atomic_write(folder / INDEX, json.dumps(index))
    shutil.rmtree(parts, ignore_errors=True)
    return tokens, _mapped(folder, index)


def _load(folder: Path, tokens: Tokens | None) -> tuple[Tokens, Sentences] | None:
    """What a full folder holds; None, or any exception, where it is not full or damaged (`cache.found`)."""
    index = index_of(folder)
    if index is None:
        return None
    if tokens is None:
        tokens = load_tokens(folder / TOKENIZER)
    sentences = _mapped(folder, index)
    if not is_summed(index):
        sums = {name: index["files"][f"{name}.bin"] for name in ARRAYS}
        watch = Watch(folder / INDEX, {name: (getattr(sentences, name), check) for name, (_, check) in sums.items()})
        sentences = replace(sentences, watch=watch)
    return tokens, sentences


def _mapped(folder: Path, index: dict[str, Any]) -> Sentences:
    # Views of plain arrays: those of memory maps are made several times as slowly.
    maps: dict[str, Any] = {
        name: np.asarray(np.memmap(folder / f"{name}.bin", dtype, mode="r")) for name, dtype in ARRAYS.items()
    }
    return Sentences(**maps, told={name: index[name] for name in TOLD if name in index})
