"""Offsets of the samples in a tar file, found once by reading its headers, and cached."""

import hashlib
import json
import os
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path

from dipole.core.utils.cache import kept_json
from dipole.core.utils.errors import DataError
from dipole.vision.sources.folder import SUFFIXES

VERSION = 1
BLOCK = 512  # bytes of a header, which precedes its file
ENDS = 1 << 20  # bytes at both ends of a file that identify it
LABELS = (".cls", ".cls.txt")


@dataclass(frozen=True)
class Sample:
    """An image in a tar file.

    key: its name up to the first dot. name: of the member. start, size: of its bytes. check: the checksum in its
    header. label: the content of its .cls file, or the entry "label" of its .json.
    """

    key: str
    name: str
    start: int
    size: int
    check: int
    label: str | None


@dataclass(frozen=True)
class Index:
    """The samples of a tar file in order, and unread images with the reason."""

    samples: tuple[Sample, ...]
    left_out: tuple[str, ...]


def index_of(path: Path) -> Index:
    """Return the samples of a tar file. As in webdataset, members with one name up to the first dot are a sample.

    Raises:
        DataError: the file is damaged, or compressed: its images could not be read in place.
    """
    try:
        found = kept_json("shards", _identity(path), lambda: asdict(_read(path)))
        return Index(tuple(Sample(**each) for each in found["samples"]), tuple(found["left_out"]))
    except OSError as error:
        raise DataError(f"the shard {path} cannot be read: {error.strerror or error}.") from error


def read_sample(path: Path, sample: Sample) -> bytes:
    """Return the bytes of an image. Raise DataError if the file has changed since it was indexed."""
    with open(path, "rb") as file:
        file.seek(sample.start - BLOCK)
        data = file.read(BLOCK + sample.size)
    header, image = data[:BLOCK], data[BLOCK:]
    try:
        same = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").chksum == sample.check
    except tarfile.TarError:
        same = False
    if not same or len(image) != sample.size:
        raise DataError(f"the shard {path} has changed while it was in use: {sample.name} is no longer where it was.")
    return image


def _identity(path: Path) -> str:
    """Identify a file by size, date and both ends. Offsets are checked again when an image is read."""
    stat = path.stat()
    digest = hashlib.sha256(f"{VERSION}/{stat.st_size}/{stat.st_mtime_ns}/".encode())
    with open(path, "rb") as file:
        digest.update(file.read(ENDS))
        file.seek(max(0, stat.st_size - ENDS))
        digest.update(file.read(ENDS))
    return digest.hexdigest()


def _read(path: Path) -> Index:
    images: dict[str, tuple[tarfile.TarInfo, int]] = {}
    labels: dict[str, str] = {}
    left_out: list[str] = []
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg():
                    continue
                folder, _, name = member.name.rpartition("/")
                if name.startswith("."):
                    continue
                stem, _, rest = name.partition(".")
                key = f"{folder}/{stem}".removeprefix("/")
                suffix = f".{rest.lower()}"
                if os.path.splitext(suffix)[1] in SUFFIXES or suffix in SUFFIXES:
                    if key in images:
                        left_out.append(f"{path}: {member.name} (a second image of the sample {key})")
                    else:
                        images[key] = member, member.offset_data
                elif suffix in LABELS or suffix == ".json":
                    label = _label(suffix, _content(archive, member))
                    if label is not None and (suffix in LABELS or key not in labels):
                        labels[key] = label
            end = max((member.offset_data + member.size for member, _ in images.values()), default=0)
    except tarfile.TarError as error:
        if path.suffix != ".tar":
            raise DataError(
                f"the shard {path} is no plain tar file ({error}): images are read in place, which a "
                "compressed one does not allow. Unpack it with gunzip (or zstd -d) to NAME.tar."
            ) from error
        raise DataError(f"the shard {path} is damaged or no tar file: {error}.") from error
    if end > path.stat().st_size:
        raise DataError(f"the shard {path} is cut off: it ends within its last image. Fetch it again.")
    samples = [
        Sample(key, member.name, start, member.size, member.chksum, labels.get(key))
        for key, (member, start) in images.items()
    ]
    return Index(tuple(samples), tuple(left_out))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # regular files only
    return file.read()


def _label(suffix: str, content: bytes) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if suffix in LABELS:
        return text or None
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    label = None
    if isinstance(told, dict):
        label = told.get("label")
    if isinstance(label, bool) or not isinstance(label, int | str):
        return None
    return str(label)
