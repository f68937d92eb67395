"""Atomic writing of files and folders: readers see the old or the new content, never half of it."""

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

from dipole.core.utils.errors import DipoleError, TrainingError, causes

_SCRATCH = re.compile(r"\..*\.[0-9a-f]{8}\.tmp(\..*)?")
"""Names of temporary files made by `scratch`."""
_HINTS = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "The disk quota is used up: free some space",
    errno.EFBIG: "The file size limit is reached (see `ulimit -f`): raise it",
    errno.EACCES: "No permission: change the owner or mode of the folder{other}",
    errno.EPERM: "No permission: change the owner or mode of the folder{other}",
    errno.EROFS: "Make it writable{other}",
    errno.ENOTDIR: "A file is in the place of a folder: remove it{other}",
    errno.EEXIST: "A file is in the place of a folder: remove it{other}",
}

NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of file systems without locks."""
_OF_THE_DISK = {*_HINTS, errno.EIO, errno.ENAMETOOLONG}


def why(error: OSError, option: str = "--runs") -> str:
    """Explain an OSError and how to fix it. `option` is what chose the path ("": unknown)."""
    other = f", or choose another folder with {option}" if option else ""
    hint = _HINTS.get(error.errno or 0, "").format(other=other)
    return ". ".join(filter(None, [error.strerror or str(error), hint])) + "."


@contextmanager
def disk_refusing(problem: str, kind: type[DipoleError] = TrainingError, option: str = "--runs") -> Iterator[None]:
    """Turn an OSError of the block, also a wrapped one, into an error of `kind`: problem, reason and fix (`why`)."""
    try:
        yield
    except Exception as error:
        refused = error if isinstance(error, OSError) else disk_error(error)
        if refused is None or isinstance(error, DipoleError):
            raise
        raise kind(f"{problem}: {why(refused, option)}") from error


def disk_error(error: BaseException | None) -> OSError | None:
    """Return the disk's refusal among an error and its causes, None if there is none.

    safetensors, torch, onnx and SQLite wrap it in errors of their own, whose text has the number at best.
    """
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _OF_THE_DISK:
            return each
        if number := re.search(r"\(os error (\d+)\)", str(each)):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        if isinstance(each, ValueError) and "embedded null" in str(each):  # in a path
            return OSError(errno.EINVAL, str(each))
        if "database or disk is full" in str(each):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if "PytorchStreamWriter failed writing" in str(each):
            return OSError(f"the disk refused the file ({str(each).splitlines()[0].partition('. ')[0]})")
    return None


is_file, is_folder = os.path.isfile, os.path.isdir
"""Unlike those of `Path`, they return False for an impossible name."""


def instead_of_file(path: Path) -> str:
    """Return what is in the place of a file, such as "a folder", or "" for a file or for nothing."""
    if is_folder(path):
        return "a folder"
    if is_file(path) or not os.path.lexists(path):
        return ""
    return ("a link that leads nowhere", "no regular file")[os.path.exists(path)]


def check_own(path: Path) -> None:
    """Refuse to append to a pipe or a link. Raise TrainingError if the path exists and is not a regular file."""
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TrainingError(f"cannot write {path}: it is not a regular file. Remove it.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder, and rename it to `path` at the end of the block.

    An exception leaves `path` unchanged. Parent folders are made, and the suffix is kept, which some writers need.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch(path) as temporary:
        yield temporary
        put_in_place(temporary, path)


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Yield a new hidden path in the folder of `path`, and remove it at the end of the block.

    If the final name depends on the content, call `put_in_place(temporary, final)` inside the block.
    """
    # Random, as another machine that shares the folder may have the same process id.
    temporary = path.with_name(f".{path.stem}.{os.urandom(4).hex()}.tmp{path.suffix}")
    try:
        yield temporary
    finally:
        with suppress(OSError):
            _remove(temporary)


def file_hash(path: Path, kind: str = "sha256") -> str:
    """Return the checksum of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def is_scratch(path: Path) -> bool:
    """Return whether a name is one of `scratch`, as a killed process leaves it."""
    return _SCRATCH.fullmatch(path.name) is not None


def remove_scratch(folder: Path, of: str = "*") -> None:
    """Remove temporary files, of names like `of`, that killed processes left. No process may write there."""
    for path in folder.glob(f".{of}.tmp*"):
        if is_scratch(path):
            with suppress(OSError):
                _remove(path)


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a file, or a folder of files, to the disk and rename it over `path`."""
    for each in (temporary, *temporary.rglob("*")):
        if each.is_file():
            with open(each, "rb+") as file:
                os.fsync(file.fileno())
    if temporary.is_dir() and path.is_dir():
        # No portable system call exchanges two folders, so there is none for an instant.
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
    """Open a file that replaces `path` at the end of the block (see `replacing`)."""
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
    """Flush a rename inside a folder to the disk, if the system can open folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
