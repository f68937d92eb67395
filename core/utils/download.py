"""Fetch a file over HTTP: resume an interrupted download, compare the checksum, and rename when complete."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from dipole.core.utils.errors import DataError
from dipole.core.utils.files import digest, sync_folder, why

BASE = "DIPOLE_DATA_URL"  # replaces everything in a URL before the file's name
CHUNK = 1 << 20
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR}
PATIENCE = 60.0  # seconds without a byte
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch.

    Attributes:
        url: its address.
        size: in bytes. None if unknown.
        checksum: "md5:..." or "sha256:..." as published by its authors. None if unknown.
        name: path inside the local folder. Default: the end of the URL.
    """

    url: str
    size: int | None = None
    checksum: str | None = None
    name: str = ""

    @property
    def path(self) -> str:
        """Return its path inside the local folder."""
        return self.name or self.url.rpartition("/")[2]


def fetch(file: RemoteFile, folder: Path, progress: Progress = lambda done, total: None) -> Path:
    """Fetch a file into a folder and return its path. An existing file is only checked.

    An interrupted download is resumed. The file gets its name when it is complete and checked.

    Raises:
        DataError: the server cannot be reached or refuses, the disk cannot be written, or size or checksum differ from
            the published ones. Then the file is renamed to *.wrong.
    """
    path = folder / file.path
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            _fetch(file, part, path, progress)
            _check(file, part)
            os.replace(part, path)
            sync_folder(path.parent)
        else:
            _check(file, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {why(error)}") from error
    return path


def address(file: RemoteFile) -> str:
    """Return the address to fetch from: $DIPOLE_DATA_URL/NAME if that is set."""
    base = os.environ.get(BASE)
    return f"{base.rstrip('/')}/{file.path}" if base else file.url


def _fetch(file: RemoteFile, part: Path, path: Path, progress: Progress) -> None:
    url = address(file)
    while True:
        before = _size(part)
        try:
            if _go_on(url, part, file.size, progress):
                return
            problem = "the connection was closed before the end"
        except HTTPError as error:
            problem = f"{error.code} {error.reason}"
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                raise
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        if _size(part) <= before:
            break  # no bytes arrived, so do not retry
    raise DataError(
        f"cannot fetch {url} ({problem}). Repeat the command to resume. Or fetch it by other means, put it at "
        f"{path}, and repeat the command."
    )


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _go_on(url: str, part: Path, size: int | None, progress: Progress) -> bool:
    """Fetch the missing part of a file. Return whether it is complete."""
    done = _size(part)
    if done == size:
        return True
    if size is not None and done > size:
        part.unlink()
        done = 0
    request = Request(url, headers={"User-Agent": "dipole"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        answer: Any = urlopen(request, timeout=PATIENCE)
    except HTTPError as error:
        if error.code == 416:  # nothing follows: the file is complete, or another file
            there = error.headers.get("Content-Range", "").rpartition("/")[2]
            if there == str(done):
                return True
            part.unlink()
            return False
        raise
    with answer:
        if answer.status != 206:
            done = 0  # the server sends the full file
        length = answer.headers.get("Content-Length")
        total = size
        if length is not None:
            total = done + int(length)
        with open(part, "ab") as file:
            file.truncate(done)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    return total is None or done >= total


def _check(file: RemoteFile, path: Path) -> None:
    size, problem = path.stat().st_size, ""
    if file.size is not None and size != file.size:
        problem = f"{size} bytes; the published file has {file.size}"
    elif file.checksum is not None:
        kind, _, published = file.checksum.partition(":")
        found = digest(path, kind)
        if found != published.lower():
            problem = f"{kind} {found}; the published one is {published}"
    if problem:
        aside = path.with_name(f"{Path(file.path).name}.wrong")
        with suppress(OSError):
            os.replace(path, aside)
        raise DataError(
            f"{address(file)}: the file has {problem}. It was moved to {aside}. Repeat the command to fetch it "
            "again. If that does not help, the file on the server has changed."
        )


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
