"""Writing files so that a reader sees the old content or the new content, never half of it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dipole.core.utils.errors import TrainingError

_SCRATCH = re.compile(r"\..*\.[0-9a-f]{8}\.tmp(\..*)?")
"""Names that `scratch` gives."""
_CURES = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "The disk quota is used up: free some space",
    errno.EFBIG: "The file size limit is reached (see `ulimit -f`): raise it",
    errno.EACCES: "No permission: change the owner or mode of the folder, or choose another one with {option}",
    errno.EPERM: "No permission: change the owner or mode of the folder, or choose another one with {option}",
    errno.EROFS: "The file system is read-only: choose another folder with {option}",
    errno.ENOTDIR: "A file stands where a folder is needed: remove it, or choose another folder with {option}",
    errno.EEXIST: "A file stands where a folder is needed: remove it, or choose another folder with {option}",
}


def why(error: OSError, option: str = "--runs") -> str:
    """Say what an OSError means for the user and what cures it; `option` is what chose the place."""
    cure = _CURES.get(error.errno or 0, "").format(option=option)
    reason = error.strerror or str(error)
    return f"{reason}. {cure}." if cure else f"{reason}."


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; a name that none can have is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def instead_of_folder(path: Path) -> str:
    """What is wrong with a folder that is to be there, such as "it is a file"; "" for a folder."""
    if is_folder(path):
        return ""
    return "it is a file" if is_file(path) else "no such folder"


def instead_of_file(path: Path) -> str:
    """What stands where a file is wanted, such as "a folder"; "" for a file, for nothing, and for no possible name."""
    if is_folder(path):
        return "a folder"
    try:
        there = path.exists()
        broken = path.is_symlink() and not there
    except (OSError, ValueError):
        return ""
    return "a link that leads nowhere" if broken else "no regular file" if there and not path.is_file() else ""


def check_own(path: Path) -> None:
    """Refuse to append where no file of ours stands: a pipe would be waited for, what a link leads to be changed.

    Raises:
        TrainingError: something is there, and it is no regular file.
    """
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TrainingError(f"cannot write {path}: it is no regular file. Remove it.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` for the block to write a file (or make a folder) at, and put that in its place.

    A reader of `path` sees the old content or the new, never half of it. Any exception removes what was written and
    leaves `path` as it was. Parent folders are made; the name keeps its suffix, which some writers look at. Raises
    OSError where the disk does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch(path) as temporary:
        yield temporary
        put_in_place(temporary, path)


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Yield a fresh hidden name beside `path`; what is left there at the end of the block is removed.

    For content whose name depends on it: `put_in_place(temporary, final)` inside the block.
    """
    # Not the pid: another machine that shares the folder may have the same.
    temporary = path.with_name(f".{path.stem}.{os.urandom(4).hex()}.tmp{path.suffix}")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            _remove(temporary)


def digest(path: Path, kind: str = "sha256") -> str:
    """The checksum of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def remove_scratch(folder: Path, of: str = "*") -> None:
    """Remove what writers that were killed have left in a folder; only for who knows that nobody writes there.

    of: a pattern of what they were writing, where others write in the folder too.
    """
    for path in folder.glob(f".{of}.tmp*"):
        if _SCRATCH.fullmatch(path.name):
            with suppress(OSError):
                _remove(path)


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a file, or a folder of files, to the disk and rename it over `path`."""
    for each in temporary.rglob("*") if temporary.is_dir() else [temporary]:
        if each.is_file():
            with open(each, "rb+") as file:
                os.fsync(file.fileno())
    if temporary.is_dir() and path.is_dir():
        # No system call exchanges two folders everywhere: for an instant there is none.
        sync_folder(temporary)
        with scratch(path) as old:
            os.replace(path, old)
            try:
                os.replace(temporary, path)
            except OSError:
                os.replace(old, path)
                raise
    else:
        os.replace(temporary, path)
    sync_folder(path.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of `path` at the end of the block (`replacing`)."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        yield file


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace a file by text (UTF-8) or bytes, atomically."""
    with atomic_file(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
