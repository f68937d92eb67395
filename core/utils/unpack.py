"""Unpacking archives that others made: regular files and folders inside one folder, nothing else."""

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
        DataError: it is damaged, or holds a link, a device or a path that leads out of the folder.
    """
    try:
        if zipfile.is_zipfile(archive):
            _unzip(archive, folder)
        else:
            _untar(archive, folder)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{archive} is damaged or no archive: {error}. Remove it and fetch it again.") from error


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
                raise DataError(f"{archive}: {member.name!r} is a link or a device; nothing but files is unpacked.")


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            target = _inside(archive, folder, member.filename)
            if member.external_attr >> 28 == 0o12:
                raise DataError(f"{archive}: {member.filename!r} is a link; nothing but files is unpacked.")
            if member.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with opened.open(member) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)


def _inside(archive: Path, folder: Path, name: str) -> Path:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and ":" in path.parts[0]):
        raise DataError(f"{archive}: {name!r} leads out of the folder it is unpacked in; nothing of it is kept.")
    return folder / path
