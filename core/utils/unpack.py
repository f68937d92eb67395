"""Unpack untrusted archives: only regular files and folders, only inside the target folder."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from dipole.core.utils.errors import DataError


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar (also .gz, .bz2, .xz) or .zip into a folder.

    Raises:
        DataError: the archive is damaged, or contains a link, a device or a path outside the folder.
    """
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, folder)
        else:
            _untar(archive, folder)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{archive} is damaged or not an archive: {error}. Remove it and fetch it again.") from error


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isdir():
                _inside(archive, folder, member.name).mkdir(parents=True, exist_ok=True)
            else:
                _write(archive, folder, member.name, member.isreg() and opened.extractfile(member))


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            if member.is_dir():
                _inside(archive, folder, member.filename).mkdir(parents=True, exist_ok=True)
            else:
                is_link = member.external_attr >> 28 == 0o12
                _write(archive, folder, member.filename, not is_link and opened.open(member))


def _write(archive: Path, folder: Path, name: str, source: Any) -> None:
    """Write a member. `source` is False for a link or a device."""
    if not source:
        raise DataError(f"{archive}: {name!r} is a link or a device; only files are unpacked.")
    target = _inside(archive, folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)


def _inside(archive: Path, folder: Path, name: str) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and ":" in path.parts[0]):
        raise DataError(f"{archive}: {name!r} points outside the target folder.")
    return folder / path
