"""Unpack untrusted archives: only regular files and folders, only inside the target folder."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

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
            target = _inside(archive, folder, member.name)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.isreg() and (source := opened.extractfile(member)) is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                with source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file)
            else:
                raise DataError(f"{archive}: {member.name!r} is a link or a device; only files are unpacked.")


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            target = _inside(archive, folder, member.filename)
            if member.external_attr >> 28 == 0o12:
                raise DataError(f"{archive}: {member.filename!r} is a link; only files are unpacked.")
            if member.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with opened.open(member) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)


def _inside(archive: Path, folder: Path, name: str) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and ":" in path.parts[0]):
        raise DataError(f"{archive}: {name!r} points outside the target folder.")
    return folder / path
