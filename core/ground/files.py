"""Writing files so that a reader sees the old content or the new content, never half of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_CURES = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "The disk quota is used up: free some space",
    errno.EFBIG: "The file size limit is reached (see `ulimit -f`): raise it",
    errno.EACCES: "No permission: change the owner or mode of the folder, or choose another one with --runs",
    errno.EPERM: "No permission: change the owner or mode of the folder, or choose another one with --runs",
    errno.EROFS: "The file system is read-only: choose another folder with --runs",
    errno.ENOTDIR: "A file stands where a folder is needed: remove it, or choose another folder with --runs",
    errno.EEXIST: "A file stands where a folder is needed: remove it, or choose another folder with --runs",
}


def why(error: OSError) -> str:
    """Say what an OSError means for the user and what cures it."""
    cure = _CURES.get(error.errno or 0)
    reason = error.strerror or str(error)
    return f"{reason}. {cure}." if cure else f"{reason}."


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` and rename it over `path` once everything is on the disk.

    Any exception removes the temporary file and leaves `path` as it was. Raises OSError where the disk does.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def atomic_write(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Put a rename inside a folder on the disk (a no-op where folders cannot be opened)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
