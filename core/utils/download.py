"""Fetch a file over HTTP and unpack it.

An interrupted download is resumed, size and checksum are compared, and a file gets its name when it is complete. Of
untrusted archives only regular files and folders are unpacked, only inside the target folder, only if undamaged.
The Hugging Face Hub's client is kept quiet, because our error already reports a failure.
"""

import errno
import logging
import lzma
import os
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, IncompleteRead
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock, Timeout

from dipole.core.utils.errors import DataError
from dipole.core.utils.files import NO_LOCKS, file_hash, sync_folder, why
from dipole.core.utils.text import shortened

BASE = "DIPOLE_DATA_URL"  # replaces everything in a URL before the file's name
CHUNK = 1 << 20
PACKED = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zip", ".npz", ".parquet")  # these have control characters
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR}
PATIENCE = 60.0  # seconds without a byte
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch, with its bytes and checksum ("md5:..." or "sha256:...") as published. None if unknown.

    `name` is its path inside the local folder, by default the end of the URL.
    """

    url: str
    size: int | None = None
    checksum: str | None = None
    name: str = ""

    @property
    def path(self) -> str:
        """Return its path inside the local folder."""
        return self.name or self.url.rpartition("/")[2]


def fetch(
    file: RemoteFile,
    folder: Path,
    progress: Progress = lambda done, total: None,
    waits: Callable[[], None] = lambda: None,
) -> Path:
    """Fetch a file into a folder and return its path. An existing file is only checked.

    A second process calls `waits`, waits for the first and uses its file. Raise DataError if the server cannot be
    reached or refuses, the disk cannot be written, or size or checksum differ. Then the file is renamed to *.wrong.
    """
    path = folder / file.path
    part = path.with_name(f"{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(path.with_name(f"{path.name}.lock"), lambda: not part.exists(), waits):
                if not path.is_file():  # otherwise another process has fetched it meanwhile
                    _fetch(file, part, path, progress)
                    _origin_of(part).unlink(missing_ok=True)
                    _check(file, part)
                    os.replace(part, path)
                    sync_folder(path.parent)
                    return path
        _check(file, path)
    except OSError as error:
        raise DataError(f"cannot write {error.filename or path}: {why(error, '--out')}") from error
    return path


@contextmanager
def file_lock(path: Path, is_done: Callable[[], bool], waits: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file during the block, where the file system has locks, and wait for a process that holds it.

    A process that waited for a removed lock file does not exclude those that come later. So the file is removed only
    when the work `is_done`, and the block must look for the result first. `waits` is called before waiting.
    """
    lock = FileLock(path)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            waits()
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        if is_done():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        lock.release()


def address(file: RemoteFile) -> str:
    """Return the address to fetch from: $DIPOLE_DATA_URL/NAME if that is set."""
    base = os.environ.get(BASE)
    return f"{base.rstrip('/')}/{file.path}" if base else file.url


def _fetch(file: RemoteFile, part: Path, path: Path, progress: Progress) -> None:
    """Fetch a file into `part`. A closed connection is opened again as long as bytes arrive."""
    url, before, problem = address(file), -1, ""
    while _size(part) > before:
        before, problem = _size(part), "the connection was closed before the end"
        try:
            if _go_on(url, file, part, progress):
                return
        except IncompleteRead:
            pass
        except HTTPError as error:
            problem = f"{error.code} {error.reason}"
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in OF_THE_DISK:
                raise
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        problem = shortened(problem.partition("\n")[0])  # a server chooses the words, and may repeat its answer
    raise DataError(
        f"cannot fetch {url} ({problem}). Repeat the command to resume. Or fetch it by other means, put it at "
        f"{path}, and repeat the command."
    )


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _go_on(url: str, file: RemoteFile, part: Path, progress: Progress) -> bool:
    """Fetch the missing end of a file. Return whether it is complete.

    A part is continued if a checksum will tell whether both belong together, or the server's tag of the file does. An
    answer with other bytes than those that are missing starts the file again.
    """
    origin = _origin_of(part)
    tag = length = ""
    told = origin.read_text(encoding="utf-8", errors="replace") if origin.is_file() else ""
    if told.startswith(f"{url}\n"):
        # An earlier version wrote no length, and a killed process may have written less.
        _, tag, length, *_ = [*told.split("\n"), "", ""]
    if not (tag or file.checksum) or (file.size is not None and _size(part) > file.size):
        part.unlink(missing_ok=True)
    done = _size(part)
    request = Request(url, headers={"User-Agent": "dipole"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    if done and tag:
        request.add_header("If-Range", tag)
    try:
        answer: Any = urlopen(request, timeout=PATIENCE)
    except HTTPError as error:
        if not done or error.code != 416:
            raise
        answer = error  # nothing follows: the part is complete, or of another file
    with answer:
        found = answer.headers.get("ETag", "")
        span, _, whole = answer.headers.get("Content-Range", "").rpartition("/")
        is_same = tag in ("", found) and (length in ("", whole) or whole in ("", "*"))
        if done and answer.status == 416 and is_same and whole in ("", str(done)) and (whole or file.checksum):
            return True
        if done and answer.status != 200 and not (is_same and span.startswith(f"bytes {done}-")):
            part.unlink()
            return _go_on(url, file, part, progress)
        if not done and answer.status not in (200, 203, None):  # None: file://
            raise ValueError(f"the server sends {answer.status} {answer.reason}, not the file")
        is_page = answer.headers.get_content_type() == "text/html" and not file.path.lower().endswith(("html", "htm"))
        if file.checksum is None and is_page:
            raise ValueError("the server sends a web page, not the file")
        packed = answer.headers.get("Content-Encoding", "identity")
        # Servers also call the file's own packing so.
        is_own = packed.lower() in ("gzip", "x-gzip") and file.path.endswith((".gz", ".tgz"))
        if packed.lower() != "identity" and not is_own:
            raise ValueError(f"the server packs the file: Content-Encoding {packed}")
        rest = answer.headers.get("Content-Length", "")
        if answer.status != 206:
            done = 0
            # A weak tag, W/"...", may be that of other bytes.
            origin.write_text(f"{url}\n{found}\n{rest}" if found.startswith('"') else "", encoding="utf-8")
        total = file.size
        if rest.isdecimal():
            total = done + int(rest)
        if answer.status == 206 and (told := whole if whole.isdecimal() else length).isdecimal():
            total = int(told)  # an answer may be shorter than what was asked for
        with open(part, "ab") as target:
            target.truncate(done)
            while chunk := answer.read(CHUNK):
                done += len(chunk)
                if total is not None and done > total:
                    raise ValueError(f"the server sends more than the {total} bytes of the file")
                target.write(chunk)
                progress(done, total)
            target.flush()
            os.fsync(target.fileno())
    return total is None or done == total


def _origin_of(part: Path) -> Path:
    """Return the file with the address that a part is from, and the server's tag (ETag) and length of the file."""
    return part.with_name(f"{part.name}.origin")


def _check(file: RemoteFile, path: Path) -> None:
    size, problem = path.stat().st_size, ""
    if file.size is not None and size != file.size:
        problem = f"{size} bytes; the published file has {file.size}"
    elif file.size is None and not size:
        problem = "0 bytes"
    elif file.checksum is not None:
        kind, _, published = file.checksum.partition(":")
        found = file_hash(path, kind)
        if found != published.lower():
            problem = f"{kind} {found}; the published one is {published}"
    elif not file.path.lower().endswith(("html", "htm")):
        with open(path, "rb") as opened:
            begin = opened.read(1000)
        if re.match(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype )?html", begin, re.I | re.DOTALL):
            problem = "a web page in place of its content"
        elif path.name.removesuffix(".part").endswith(PACKED) and not re.search(rb"BZh|[\0-\x08\x0e-\x1f]", begin):
            problem = f"text in place of its content: {shortened(begin.decode(errors='replace'))!r}"
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
            content = partial(opened.extractfile, member)
            _write(archive, folder, member.name, member.isdir(), member.isreg(), content)
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
            is_link = member.external_attr >> 28 == 0o12
            _write(archive, folder, member.filename, member.is_dir(), not is_link, partial(opened.open, member))


def _write(archive: Path, folder: Path, name: str, is_folder: bool, is_file: bool, content: Callable[[], Any]) -> None:
    """Write a member, which is a folder, a file of this content, or a link or a device."""
    if not is_folder and not is_file:
        raise DataError(f"{archive}: {name!r} is a link or a device; only files are unpacked.")
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and ":" in path.parts[0]):
        raise DataError(f"{archive}: {name!r} points outside the target folder.")
    target = folder / path
    if is_folder:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with content() as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)


def offline_by() -> str:
    """Return the environment variable by which the user has switched the Hub off, or ""."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), "")


@contextmanager
def without_retry_messages(name: str = "huggingface_hub") -> Iterator[None]:
    """Print no failed attempts of the Hub's client, which still retries, or no warnings of another logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
