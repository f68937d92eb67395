"""The cache of encoded corpora and pair tables: folders named by content, built by one process at a time."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.cache import cache_folder, content_of, found
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import atomic_write, disk_refusing, file_hash, remove_scratch
from dipole.core.utils.progress import Progress
from dipole.core.utils.rows import PACKINGS, hub_version, is_saved, row_files
from dipole.text.config import TextSettings
from dipole.text.corpus import corpus_files, pydoc_documents
from dipole.text.splitting import READER
from dipole.text.vocabulary import Tokens

VERSION = 11  # of the folders' format
LARGE = 32 << 20  # bytes of a corpus that is cached even if no folder is named
FEW = 100_000  # sentences of a Hub data set that stay in memory
INDEX = "index.json"
READ_BY = ("unit", "column", "limit", "max_length")
Told = Callable[[int, int], None]
"""Receives the characters that were read since the last call, and the number of sentences or rows so far."""
T = TypeVar("T")


def corpus_folder(config: TextSettings, tokens: Tokens | None, texts_hash: str | None = None) -> Path | None:
    """Return the folder for the ids of a corpus, named by its content, or None if they stay in memory.

    Without `tokens` there is a vocabulary of the corpus's own words. `texts_hash` is that of a pair table.
    """
    by = tokens.fingerprint if tokens is not None else ["words", config.vocabulary_size, config.lower]
    if texts_hash is not None:
        return _folder(config, lambda: [config.max_length, by, texts_hash])
    asked = {name: getattr(config, name) for name in READ_BY}
    return _folder(config, lambda: [asked, by, _content(config), version("nltk")])


def table_folder(config: TextSettings) -> Path | None:
    """Return the folder for a pair table, or None if it stays in memory."""
    label = [config.label, config.label_use, config.label_from]
    return _folder(config, lambda: ["table", config.columns, config.limit, label, _content(config)])


def _folder(config: TextSettings, key: Callable[[], list[Any]]) -> Path | None:
    if config.cache is None and not _is_large(config):
        return None
    place = Path(config.cache) if config.cache is not None else cache_folder() / "corpora"
    return place / hashlib.sha256(json.dumps([VERSION, *key()]).encode()).hexdigest()[:16]


def _is_large(config: TextSettings) -> bool:
    if config.corpus.startswith("hub:"):
        return config.limit is None or config.limit > FEW
    return sum(file.stat().st_size for file in _files(config)) > LARGE


def _files(config: TextSettings) -> list[Path]:
    path = Path(config.corpus)
    if config.corpus == "pydoc" or config.corpus.startswith("hub:"):
        return []
    if is_saved(path):
        return sorted(file for file in path.rglob("*") if file.is_file())
    if config.pairs == "columns":
        return row_files(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader warns
        return corpus_files(config.corpus)


def version_of(source: str) -> str:
    """Return the version of "hub:NAME". Raise DataError with the command that fetches it, if there is one."""
    name = source.removeprefix("hub:")
    try:
        return hub_version(name, READER)
    except DataError as error:
        get = how_to_get(name.partition(":")[0].rpartition("/")[2])
        raise DataError(f"{str(error).removesuffix('.')}: --set text.corpus=PATH.{get}") from error


def _content(config: TextSettings) -> list[str]:
    """Identify what a corpus holds and how its bytes are decoded."""
    if config.corpus == "pydoc":
        text = "\n".join("\n".join(document.sentences) for document in pydoc_documents())
        return ["pydoc", hashlib.sha256(text.encode()).hexdigest()]
    if config.corpus.startswith("hub:"):
        return ["hub", config.split, version_of(config.corpus)]
    files = _files(config)
    split = config.split if is_saved(Path(config.corpus)) else ""
    kinds = ["".join(file.suffixes[-2:]).lower() for file in files]
    with _readable(config):
        return [content_of(files), config.encoding, split, *kinds]


def _readable(config: TextSettings) -> AbstractContextManager[None]:
    return disk_refusing(f"the corpus {config.corpus} cannot be read", DataError, "text.corpus")


def _stamps(config: TextSettings) -> list[tuple[str, int, int]]:
    """Return path, size and date of each file, to detect changes during reading."""
    with _readable(config):
        states = [(file, file.stat()) for file in _files(config)]
    return [(str(file), state.st_size, state.st_mtime_ns) for file, state in states]


def load_or_build(
    folder: Path,
    load: Callable[[Path, dict[str, Any]], T],
    build: Callable[[Path], tuple[dict[str, Any], list[str]]],
) -> T:
    """Load a complete folder, which needs no lock, or build it while other processes wait.

    `build` writes files and returns values for the index, which `load` gets, and the names of the files.
    """

    def read() -> T:
        index = json.loads((folder / INDEX).read_bytes())
        if any(file_hash(folder / name) != told for name, told in index["files"].items()):
            raise ValueError("a file is damaged")
        return load(folder, index)

    content = found(read)
    if content is not None:
        return content
    with disk_refusing(f"the corpus cannot be cached in {folder}", DataError, "text.cache"):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            content = found(read)
            if content is None:
                remove_scratch(folder)  # of a killed process
                values, files = build(folder)
                hashes = {name: file_hash(folder / name) for name in files}
                atomic_write(folder / INDEX, json.dumps({**values, "files": hashes}))
                content = read()
    return content


@contextmanager
def quiet(datasets: Any) -> Iterator[None]:
    """Hide the progress bars of `datasets`."""
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()


def hash_of(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


@contextmanager
def reading(config: TextSettings, rank: int) -> Iterator[dict[str, Any]]:
    """Yield `tell` and `unchanged` of a reader. All ranks read the same corpus, and the first shows how far it is."""
    before = _stamps(config)
    progress = Progress(mute=rank > 0 or not _is_large(config))
    total = sum(size for _, size, _ in before) // 1_000_000
    if any(file.lower().endswith((*PACKINGS, ".parquet", ".arrow")) for file, _, _ in before):
        total = 0  # unknown
    read = 0
    progress.start("read the corpus", total, 0, "MB")

    def tell(characters: int, sentences: int) -> None:
        nonlocal read
        read += characters
        progress.values({"sentences": sentences})
        progress.update(read // 1_000_000)

    try:
        with warnings.catch_warnings():
            if rank:
                warnings.simplefilter("ignore")
            yield {"tell": tell, "unchanged": lambda: _stamps(config) == before}
    finally:
        progress.close()
