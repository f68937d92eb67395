"""Unpack untrusted archives: only regular files and folders, only inside the target folder, only if undamaged."""

from __future__ import annotations

import errno
import lzma
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from dipole.core.utils.errors import DataError

CHUNK = 1 << 20
# Decompressors, readers of headers and codecs of names each raise their own types.
DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, MemoryError,
    NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip

# Errors of the disk have other numbers, those of gzip and bz2 none. A wrong offset in a zip is an invalid argument. The
# others come from names in the archive, as the target folder is new.
OF_THE_ARCHIVE = {None, errno.EINVAL, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}


class CheckedHeader(tarfile.TarInfo):
    """A header that raises ReadError if it is damaged, or if the mark at the end is missing.

    tarfile alone takes both for the end of the archive.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Any:
        if not buf:
            raise tarfile.ReadError("it was cut off: the mark at the end is missing")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not any(buf):  # the mark at the end
                raise
            raise tarfile.ReadError(f"a header is damaged: {error}") from error


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar (also .gz, .bz2, .xz) or .zip into a folder."""
    try:
        if zipfile.is_zipfile(archive) and not tarfile.is_tarfile(archive):  # a tar may end with a zip
            _unzip(archive, folder)
        else:
            _untar(archive, folder)
    except (*DAMAGED, OSError) as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno not in OF_THE_ARCHIVE):
            raise
        reason = str(error).partition("\n")[0].rstrip(":.") or type(error).__name__
        raise DataError(
            f"{archive} is damaged, or neither tar (.gz, .bz2, .xz) nor zip: {reason}. Remove it and fetch it again."
        ) from error


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive, tarinfo=CheckedHeader) as opened:
        for member in opened:
            if member.isdir():
                _inside(archive, folder, member.name).mkdir(parents=True, exist_ok=True)
            else:
                _write(archive, folder, member.name, member.isreg() and opened.extractfile(member))
        if not opened.getmembers():
            raise tarfile.ReadError("it has no files")  # nothing but zeros is a valid archive
        # The checksum of a compressed stream is behind its last byte.
        try:
            while opened.fileobj is not None and opened.fileobj.read(CHUNK):
                pass
        except EOFError:
            with open(archive, "rb") as file:
                file.seek(max(0, archive.stat().st_size - CHUNK))
                # LZMAFile takes zeros behind the end of an .xz for the begin of another stream.
                if not file.read().rstrip(b"\0").endswith(b"YZ"):
                    raise


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        if not opened.namelist():
            raise zipfile.BadZipFile("it has no files")
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
