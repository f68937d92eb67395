"""Folders of a cache: filled by one process while others wait, and looked through before they are used."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from dipole.core.utils.cache import found, sum_of
from dipole.core.utils.errors import DataError

INDEX, TOKENIZER = "index.json", "tokenizer.json"
SUMMED = 2 << 30  # bytes of arrays whose check sums are looked at before they are used; those of larger ones meanwhile


def not_kept(folder: Path, error: OSError) -> DataError:
    """What is said where the folder for a corpus cannot be written."""
    return DataError(
        f"the corpus cannot be kept in {folder}: {error.strerror or error}. Free some space there, or set text.cache "
        f"to a folder with room that can be written."
    )


def index_of(folder: Path) -> dict[str, Any] | None:
    """What a folder says of itself, if its files are what they were; of large arrays the sizes alone are looked at.

    None, or any exception, where it is not full or damaged (`cache.found`).
    """
    index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    files: dict[str, list[int]] = index["files"]
    if any((folder / name).stat().st_size != size for name, (size, _) in files.items()):
        return None
    looked_at = files if is_summed(index) else files.keys() & {TOKENIZER}
    return None if any(sum_of(folder / name) != files[name] for name in looked_at) else index


def is_summed(index: dict[str, Any]) -> bool:
    """Whether check sums of all files are looked at before they are used."""
    return sum(size for size, _ in index["files"].values()) <= SUMMED


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Hold a cache folder alone while it is filled: whoever comes meanwhile waits, and then finds it full.

    A full one is read without a lock, so that it may lie where nothing can be written.

    Raises:
        DataError: the folder cannot be written.
    """
    if found(partial(index_of, folder)) is not None:
        yield
        return
    lock = FileLock(folder / ".lock", is_singleton=True)  # who holds it may fill the folder by `encode_pieces`
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in one error where a folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise not_kept(folder, error) from error
