"""Where the ids of a corpus are kept: below a name that its contents and all that reads them give."""

import hashlib
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dipole.core.utils.cache import cache_folder, content_of
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import why
from dipole.core.utils.progress import PLAIN_SECONDS, Progress
from dipole.core.utils.rows import hub_version, is_saved, row_files
from dipole.text.config import TextSettings
from dipole.text.corpus import corpus_files, pydoc_documents
from dipole.text.encoded import Told
from dipole.text.splitting import READER
from dipole.text.vocabulary import Tokens

VERSION = 1  # of what is kept
LARGE = 32 << 20  # bytes of a corpus whose ids are kept in files even if no folder is named
MEGA = 1_000_000
FEW = 100_000  # first sentences of a data set of the Hub that are held in memory
READ_BY = ("unit", "column", "limit", "max_length")


def place_of(config: TextSettings, texts: str | None, tokens: Tokens | None) -> Path | None:
    """The folder for the ids of a corpus; None where they stay in memory.

    It depends on what the files hold, not on where they lie or when they were changed, and on what the tokenizer is,
    not on its name.

    Args:
        texts: the hash of the texts of a table of pairs, which are what is read then.
        tokens: the tokenizer; None: words of the corpus, to be counted.

    Raises:
        DataError: the corpus cannot be read.
    """
    if config.cache is None and not _is_large(config):
        return None
    asked = {name: getattr(config, name) for name in READ_BY} if texts is None else {"max_length": config.max_length}
    by = tokens.fingerprint if tokens is not None else ["words", config.vocabulary_size, config.lower]
    key = [VERSION, asked, by, _content(config) if texts is None else texts, version("nltk")]
    return _below(config, key)


def place_of_table(config: TextSettings) -> Path | None:
    """The folder for a table of pairs, named by what its files hold; None where it stays in memory.

    Raises:
        DataError: the table cannot be read.
    """
    if config.cache is None and not _is_large(config):
        return None
    return _below(config, [VERSION, "table", config.columns, config.limit, _content(config)])


def _below(config: TextSettings, key: list[Any]) -> Path:
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return (cache_folder() / "corpora" if config.cache is None else Path(config.cache)) / name


def _is_large(config: TextSettings) -> bool:
    if config.corpus.startswith("hub:"):
        return config.limit is None or config.limit > FEW
    return sum(file.stat().st_size for file in _files(config)) > LARGE


def _files(config: TextSettings) -> list[Path]:
    """The files of a local corpus."""
    corpus, path = config.corpus, Path(config.corpus)
    if corpus == "pydoc":
        return []
    if config.pairs == "columns" and not is_saved(path):
        return row_files(path)
    if is_saved(path):
        return sorted(file for file in path.rglob("*") if file.is_file())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading says it
        return corpus_files(corpus)


def _content(config: TextSettings) -> list[str]:
    """What a corpus is, and how its bytes are read."""
    if config.corpus == "pydoc":
        return ["pydoc", _hash_of(sentence for document in pydoc_documents() for sentence in ("", *document.sentences))]
    if config.corpus.startswith("hub:"):
        return ["hub", config.split, hub_version(config.corpus.removeprefix("hub:"), READER)]
    files = _files(config)
    kinds = ["".join(file.suffixes[-2:]).lower() for file in files]
    try:
        return [content_of(files), config.encoding, config.split if is_saved(Path(config.corpus)) else "", *kinds]
    except OSError as error:
        raise DataError(f"the corpus {config.corpus} cannot be read: {why(error)}") from error


def stamp_of(config: TextSettings) -> list[tuple[str, int, int]]:
    """Path, size and date of each file of a local corpus; they tell whether it was changed while it was read."""
    files = [] if config.corpus.startswith("hub:") else _files(config)
    try:
        return [(str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    except OSError as error:
        raise DataError(f"the corpus {config.corpus} cannot be read: {why(error)}") from error


def _hash_of(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


@contextmanager
def telling(config: TextSettings, mute: bool) -> Iterator[Told]:
    """Show how far the reading of a large corpus is."""
    progress = Progress(mute=mute or not _is_large(config))
    files = [] if config.corpus.startswith("hub:") else _files(config)
    packed = not files or any(file.name.lower().endswith((".gz", ".parquet", ".arrow")) for file in files)
    total = 0 if packed else sum(file.stat().st_size for file in files)
    read = 0
    said = time.monotonic()
    if total:
        progress.start("read the corpus", total // MEGA, 0, "MB")

    def tell(characters: int, sentences: int) -> None:
        nonlocal read, said
        read += characters
        progress.values({"sentences": sentences})
        if total:
            progress.update(min(read, total) // MEGA)
        elif time.monotonic() - said > PLAIN_SECONDS:
            said = time.monotonic()
            progress.note(f"read {read // MEGA} MB of the corpus, {sentences:,} sentences")

    try:
        yield tell
    finally:
        progress.close()
