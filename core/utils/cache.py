"""Files of a cache, named by a hash of the content that they depend on (`content_of`).

A damaged cache file is not an error: it is made again (`kept`). Paths and dates are not part of the name, so a changed
file never gets an old result.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dipole.core.utils.files import atomic_write

FOLDER = "DIPOLE_CACHE"
READ = 1 << 20  # bytes
T = TypeVar("T")


def cache_folder() -> Path:
    """Return $DIPOLE_CACHE, or dipole/ in the user's cache folder."""
    if told := os.environ.get(FOLDER):
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dipole"


def found(read: Callable[[], T]) -> T | None:
    """Return `read()`, or None if the cache file is missing or damaged.

    Every exception of a reader counts as damage: BadZipFile, JSONDecodeError, EOFError, KeyError, errors of safetensors
    and tokenizers.
    """
    try:
        return read()
    except MemoryError:
        raise
    except Exception:
        return None


def kept(path: Path, read: Callable[[Path], T | None], make: Callable[[], T], write: Callable[[Path, T], None]) -> T:
    """Return the content of a cache file. Make and write it if the file is missing or damaged.

    Args:
        path: the file.
        read: reads it. None or any exception means that it is damaged.
        make: makes the content.
        write: writes it atomically.
    """
    content = found(lambda: read(path))
    if content is None:
        content = make()
        write(path, content)
    return content


def kept_json(kind: str, identity: str, make: Callable[[], Any]) -> Any:
    """Return `make()`, from the cache if it was made for this identity before.

    Args:
        kind: folder in the cache.
        identity: hash of what the value depends on, in hexadecimal digits.
        make: makes the value. It is not cached if the cache cannot be written.
    """

    def read(path: Path) -> tuple[Any] | None:
        told = json.loads(path.read_bytes())
        intact = told["identity"] == identity and told.get("check") == _check(told["content"])
        return (told["content"],) if intact else None

    def write(path: Path, content: tuple[Any]) -> None:
        told = {"identity": identity, "check": _check(content[0]), "content": content[0]}
        with suppress(OSError):
            atomic_write(path, json.dumps(told))

    return kept(cache_folder() / kind / f"{identity}.json", read, lambda: (make(),), write)[0]


def _check(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


def content_of(files: Iterable[Path]) -> str:
    """Return a hash of the contents of files, in their order.

    Files are read completely (one or two seconds for a gigabyte), because equal size, date and inode do not prove equal
    content.

    Raises:
        OSError: one cannot be read.
    """
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def sum_of(file: Path) -> list[int]:
    """Return size and CRC of a file, to detect damage later."""
    check = size = 0
    with open(file, "rb") as stream:
        while data := stream.read(READ):
            check, size = zlib.crc32(data, check), size + len(data)
    return [size, check]
