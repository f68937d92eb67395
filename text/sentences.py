"""A corpus as token ids. Large corpora are cut and numbered by `datasets`, in several processes, with its cache."""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.utils.cache import found
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_file, atomic_write, why
from dipole.text.cache import Told, hash_of, load_or_build, quiet
from dipole.text.corpus import Piece, sentences_of
from dipole.text.splitting import READER
from dipole.text.vocabulary import UNKNOWN, Tokens, counted_vocabulary, load_tokens, number_words

ARRAYS = {"tokens": np.int32, "offsets": np.int64, "document": np.int32}
TOKENIZER, PARTS = "tokenizer.json", "parts"
BLOCK = 1_000_000  # characters of a block, which one process cuts at a time
PART = 32  # blocks that become one Arrow file. An interrupted run continues after the last file
Encoded = Iterable[dict[str, Any]]  # blocks as `Cut` returns them


@dataclass(frozen=True)
class Sentences:
    """Sentences as ids: the tokens of sentence i are `tokens[offsets[i]:offsets[i + 1]]`. Arrays can be memory maps."""

    tokens: np.ndarray  # (T,) int32
    offsets: np.ndarray  # (n + 1,) int64
    document: np.ndarray  # (n,) int32, rising

    def __len__(self) -> int:
        return len(self.document)

    @cached_property
    def unknown(self) -> int:
        """Number of tokens with id 0."""
        return int((self.tokens == 0).sum())

    @cached_property
    def fingerprint(self) -> str:
        return hash_of(self.tokens, self.offsets, self.document)

    @property
    def starts(self) -> np.ndarray:
        """(documents + 1,) the first sentence of each document that has one, and the number of sentences."""
        changes = 1 + np.flatnonzero(self.document[:-1] != self.document[1:])
        return np.concatenate([[0], changes, [len(self)]]).astype(np.int64)

    def has_neighbours(self, rows: np.ndarray) -> bool:
        """Return whether two consecutive rows are of one document."""
        document = self.document[rows]
        return bool((document[:-1] == document[1:]).any())

    def ids(self, rows: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        return [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in rows]

    def take(self, rows: np.ndarray) -> "Sentences":
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.concatenate([self.tokens[:0], *self.ids(rows)])
        return Sentences(np.asarray(tokens), offsets, np.asarray(self.document[rows]))


@dataclass(frozen=True)
class Cut:
    """Cut text into sentences and number their tokens: by a tokenizer, or the words of each block without `tokens`."""

    max_length: int
    lower: bool = False
    tokens: Tokens | None = None

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Turn a block of text into arrays. The numbers in `tokens` index `words`, which is empty if they are ids."""
        sentences: list[str] = []
        document: list[int] = []
        for owner, text, is_lines in zip(block["document"], block["text"], block["is_lines"], strict=True):
            cut = sentences_of(text, is_lines)
            sentences += cut
            document += [owner] * len(cut)
        words: list[str] = []
        if self.tokens is None:
            flat, lengths, words = number_words(sentences, self.lower)
        else:
            ids = self.tokens.encode(sentences, self.max_length)
            lengths = np.array([len(each) for each in ids], np.int32)
            flat = np.fromiter((i for each in ids for i in each), np.int32, int(lengths.sum()))
        return {"tokens": flat, "lengths": lengths, "document": np.array(document, np.int32), "words": words}


def blocks_of(pieces: Iterable[Piece], size: int) -> Iterator[dict[str, Any]]:
    """Group pieces into blocks of about `size` characters. The blocks depend on the pieces alone."""
    number = -1
    characters = 0
    block: dict[str, Any] = {"document": [], "text": [], "is_lines": []}
    for piece in pieces:
        number += piece.starts
        block["document"].append(number)
        block["text"].append(piece.text)
        block["is_lines"].append(piece.is_lines)
        characters += len(piece.text)
        if characters >= size:
            yield block
            block, characters = {name: [] for name in block}, 0
    if block["document"]:
        yield block


def encode_pieces(
    pieces: Iterable[Piece],
    cut: Cut,
    *,
    vocabulary_size: int = 50_000,
    limit: int | None = None,
    folder: Path | None = None,
    processes: int = 1,
    size: int = BLOCK,
    tell: Told | None = None,
    unchanged: Callable[[], bool] = lambda: True,
) -> tuple[Tokens, Sentences]:
    """Cut the first `limit` sentences of a corpus, build a vocabulary if there is no tokenizer, and number the tokens.

    Memory is bounded by some tens of megabytes of text, plus the words. A folder caches the ids as memory-mapped files:
    an interrupted call continues there. `unchanged` returns False if the corpus has changed since it was named.
    """
    blocks = blocks_of(_readable(pieces), size)
    if folder is None:
        cut_here = _cut_parts(blocks, 1, lambda number, rows: [cut(row) for row in rows], limit, tell)
        tokens = cut.tokens or _vocabulary(cut_here, limit, vocabulary_size, cut.lower)
        arrays = list(_numbered(cut_here, cut, tokens, limit))
        if not sum(len(lengths) for _, lengths, _ in arrays):
            raise DataError("the corpus holds no sentence")
        flat, lengths, document = (np.concatenate(each) for each in zip(*arrays, strict=True))
        return tokens, Sentences(flat, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), document)

    def build(folder: Path) -> tuple[dict[str, Any], list[str]]:
        parts = folder / PARTS
        parts.mkdir(exist_ok=True)
        run = partial(_map_part, folder=parts, cut=cut, processes=processes)
        stored = _cut_parts(blocks, PART, run, limit, tell)
        if not unchanged():
            shutil.rmtree(parts)
            raise DataError(
                "the corpus was changed while it was read. Nothing is cached. Start again when it is final."
            )
        files = [f"{name}.bin" for name in ARRAYS]
        tokens = cut.tokens
        if tokens is None:
            tokens = _vocabulary(stored, limit, vocabulary_size, cut.lower)
            atomic_write(folder / TOKENIZER, tokens.tokenizer.to_str(pretty=True))
            files.append(TOKENIZER)
        unknown = _write(folder, _numbered(stored, cut, tokens, limit))
        shutil.rmtree(parts, ignore_errors=True)
        return {"known": {"unknown": unknown, "fingerprint": _mapped(folder, {}).fingerprint}}, files

    def load(folder: Path, index: dict[str, Any]) -> tuple[Tokens, Sentences]:
        return cut.tokens or load_tokens(folder / TOKENIZER), _mapped(folder, index["known"])

    return load_or_build(folder, load, build)


def _readable(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Report a file that disappears during reading by its own name, not by that of the cache folder."""
    try:
        yield from pieces
    except OSError as error:
        raise DataError(f"the corpus cannot be read: {error.filename or ''} {why(error, 'text.corpus')}") from error


def _cut_parts(
    blocks: Iterator[dict[str, Any]],
    together: int,
    run: Callable[[int, list[dict[str, Any]]], Encoded],
    limit: int | None,
    tell: Told | None,
) -> list[Encoded]:
    """Cut some blocks at a time, until there are enough sentences."""
    parts: list[Encoded] = []
    sentences = 0
    while rows := list(islice(blocks, together)):
        part = run(len(parts), rows)
        parts.append(part)
        sentences += sum(len(row["lengths"]) for row in part)
        if tell is not None:
            tell(sum(len(text) for row in rows for text in row["text"]), sentences)
        if limit is not None and sentences >= limit:
            break
    return parts


class _Part:
    """The blocks of some Arrow files, as mapped arrays. The files are open only while they are read."""

    def __init__(self, dataset: Any) -> None:
        self._files = [file["filename"] for file in dataset.cache_files]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            rows = READER.package("datasets").Dataset.from_file(file).with_format("arrow")
            for row in rows.iter(batch_size=1):
                arrays = {name: row[name][0].values.to_numpy() for name in ("tokens", "lengths", "document")}
                yield {**arrays, "words": row["words"][0].as_py()}


def _map_part(number: int, rows: list[dict[str, Any]], folder: Path, cut: Cut, processes: int) -> _Part:
    """Cut blocks with `Dataset.map`, whose cache file is used if it is complete."""
    datasets = READER.package("datasets")
    types = {"tokens": "int32", "lengths": "int32", "document": "int32", "words": "string"}
    features = datasets.Features({name: datasets.List(datasets.Value(kind)) for name, kind in types.items()})
    blocks = datasets.Dataset.from_list(rows)
    name = f"{number:05d}"
    options = {
        "features": features,
        "remove_columns": blocks.column_names,
        "cache_file_name": str(folder / f"{name}.arrow"),
        "new_fingerprint": f"{folder.parent.name}-{name}",
        "num_proc": processes if processes > 1 and len(rows) > 1 else None,  # None: this process
        "writer_batch_size": 4,  # rows of some megabytes
    }
    with quiet(datasets):
        if any(folder.glob(f"{name}*.arrow")):  # of an interrupted run
            part = found(lambda: blocks.map(cut, load_from_cache_file=True, **options))
            if part is not None and len(part) == len(rows):
                return _Part(part)
            for file in folder.glob(f"{name}*.arrow"):
                file.unlink()
        run = partial(_cut_apart, cut=cut, parent=os.getpid())
        try:
            return _Part(blocks.map(run, load_from_cache_file=False, **options))
        except RuntimeError as error:
            if "died" not in str(error):
                raise
            raise DataError(
                "a process that read the corpus was killed. If memory ran out, set text.processes = 1. The next call "
                "continues behind the last finished part."
            ) from error


def _cut_apart(block: dict[str, Any], cut: Cut, parent: int) -> dict[str, Any]:
    """Cut a block. A process of its own leaves signals to the parent."""
    if os.getpid() != parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return cut(block)


def _vocabulary(parts: Iterable[Encoded], limit: int | None, size: int, lower: bool) -> Tokens:
    """Build the vocabulary of the most frequent words in the first `limit` sentences."""
    counts: Counter[str] = Counter()
    for block in _first(parts, limit):
        numbers = block["tokens"]
        found = np.bincount(numbers[numbers >= 0], minlength=len(block["words"])).tolist()
        counts.update(dict(zip(block["words"], found, strict=True)))
    counts.pop(UNKNOWN, None)
    return counted_vocabulary(((word, count) for word, count in counts.items() if count), size, lower)


def _numbered(
    parts: Iterable[Encoded], cut: Cut, tokens: Tokens, limit: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield ids, lengths and documents of each block, with at most `cut.max_length` ids a sentence."""
    for block in _first(parts, limit):
        flat, lengths = block["tokens"], block["lengths"]
        if cut.tokens is None:
            ids = [tokens.index.get(word, 0) for word in block["words"]]
            table = np.array([*ids, tokens.empty], np.int32)  # the last one for EMPTY
            place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            flat = table[flat[place < cut.max_length]]
            lengths = np.minimum(lengths, cut.max_length)
        yield flat, lengths, block["document"]


def _first(parts: Iterable[Encoded], limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield the blocks of all parts up to `limit` sentences."""
    left = sys.maxsize if limit is None else limit
    for block in chain.from_iterable(parts):
        if len(block["lengths"]) > left:
            lengths = block["lengths"][:left]
            flat = block["tokens"][: int(lengths.sum())]
            yield {**block, "tokens": flat, "lengths": lengths, "document": block["document"][:left]}
            return
        left -= len(block["lengths"])
        yield block


def _write(folder: Path, blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> int:
    """Write the three arrays. Return the number of unknown tokens."""
    size = unknown = 0
    with (
        atomic_file(folder / "tokens.bin") as flat,
        atomic_file(folder / "offsets.bin") as offsets,
        atomic_file(folder / "document.bin") as documents,
    ):
        offsets.write(np.zeros(1, np.int64).tobytes())
        for tokens, lengths, document in blocks:
            flat.write(np.ascontiguousarray(tokens).data)
            offsets.write((size + np.cumsum(lengths, dtype=np.int64)).data)
            documents.write(np.ascontiguousarray(document).data)
            size += len(tokens)
            unknown += int((tokens == 0).sum())
        if not size:
            raise DataError("the corpus holds no sentence")
    return unknown


def _mapped(folder: Path, known: dict[str, Any]) -> Sentences:
    # Slices of plain arrays are made several times as fast as slices of memory maps.
    arrays = {name: np.asarray(np.memmap(folder / f"{name}.bin", dtype, mode="r")) for name, dtype in ARRAYS.items()}
    sentences = Sentences(**arrays)
    vars(sentences).update(known)  # the cached properties
    return sentences
