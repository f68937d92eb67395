"""Files of a cache, named by a hash of the content that they depend on (`content_of`).

A damaged cache file is not an error: it is made again. Paths and dates are not part of the name, so a changed
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

from dipole.core.utils.files import atomic_write, file_hash

FOLDER = "DIPOLE_CACHE"
T = TypeVar("T")


def cache_folder() -> Path:
    """Return $DIPOLE_CACHE, or dipole/ in the user's cache folder."""
    if told := os.environ.get(FOLDER):
        return Path(told).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dipole"


def found(read: Callable[[], T]) -> T | None:
    """Return `read()`, or None if the cache file is missing or damaged, of which a reader may raise any exception."""
    try:
        return read()
    except MemoryError:
        raise
    except Exception:
        return None


def kept_json(kind: str, identity: str, make: Callable[[], Any]) -> Any:
    """Return `make()`, from the cache if it was made for this identity (hexadecimal digits) before.

    It is not cached if the cache cannot be written.
    """
    path = cache_folder() / kind / f"{identity}.json"
    told = found(lambda: dict(json.loads(path.read_bytes()))) or {}
    if told.get("identity") == identity and told.get("check") == _check(told.get("content")):
        return told["content"]
    content = make()
    with suppress(OSError):
        atomic_write(path, json.dumps({"identity": identity, "check": _check(content), "content": content}))
    return content


def _check(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


def content_of(files: Iterable[Path]) -> str:
    """Return a hash of the contents of files, in their order. Equal size, date and inode do not prove equal content."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(bytes.fromhex(file_hash(file)))
    return whole.hexdigest()
