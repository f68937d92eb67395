"""What was found out once and can be found out again: files of a cache, and what their contents are named by.

A file of a cache that was cut off or damaged is no error: it is made again (`kept`). What a cache is asked for, it is
asked for by content (`content_of`), not by a path and a date: a changed file is another one wherever it lies.
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
    """$DIPOLE_CACHE, or dipole/ in the user's cache folder."""
    if told := os.environ.get(FOLDER):
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dipole"


def found(read: Callable[[], T]) -> T | None:
    """What `read` returns of files of a cache, or None where they are missing, cut off or damaged.

    Whatever a reader raises then (BadZipFile, JSONDecodeError, EOFError, KeyError, an error of safetensors or the bare
    Exception of tokenizers) says the same: the file is of no use, and what it held can be made again.
    """
    try:
        return read()
    except MemoryError:
        raise
    except Exception:
        return None


def kept(path: Path, read: Callable[[Path], T | None], make: Callable[[], T], write: Callable[[Path, T], None]) -> T:
    """What a file of a cache holds; made, and written there, where there is none or a damaged one.

    Args:
        read: None, or any exception, says that the file is of no use.
        write: to the path, whole or not at all.
    """
    content = found(lambda: read(path))
    if content is None:
        content = make()
        write(path, content)
    return content


def kept_json(kind: str, identity: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once for an identity (hexadecimal digits of what it depends on).

    A file that is cut off or damaged is made again; where nothing can be written, nothing is kept.
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
    """One number for what some files hold, in their order, whatever they are called and wherever they lie.

    Each is read whole: size, date and inode of a file do not tell that it is the same (a file system may keep dates to
    the second, a program may set them back), and reading costs a second or two for a gigabyte.

    Raises:
        OSError: one cannot be read.
    """
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()


def sum_of(file: Path) -> list[int]:
    """Size and check sum of a file, by which damage is recognised when it is read again."""
    check = size = 0
    with open(file, "rb") as stream:
        while data := stream.read(READ):
            check, size = zlib.crc32(data, check), size + len(data)
    return [size, check]
