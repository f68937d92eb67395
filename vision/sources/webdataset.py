"""Shards in the format of webdataset: tar files whose images are read in place, by a cached index of their headers."""

import glob
import hashlib
import json
import math
import os
import posixpath
import re
import tarfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dipole.core.utils.cache import kept_json
from dipole.core.utils.download import CheckedHeader
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import are, counted
from dipole.vision.decoding import Stream
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import LFS, SHARDS, Classes, Decoding, Source, by_split, register_source
from dipole.vision.sources.folder import SUFFIXES
from dipole.vision.sources.images import decode_all, select, warn_of_left_out
from dipole.vision.sources.labels import labels_of

RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000  # shards of a pattern
VERSION = 6  # of the cached index
ENDS = 1 << 20  # bytes at both ends of a file that identify it
LABELS = (".cls", ".cls.txt")


class Sample(NamedTuple):
    """An image in a tar file, with the content of its .cls file or the entry "label" of its .json."""

    name: str
    start: int
    size: int
    label: str | None


@register_source(f"shards {SHARDS}train-{{000..009}}.tar", matches=lambda text, path: text.startswith(SHARDS))
def webdataset(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open tar files: {000..009}, {a,b}, * and ?, several joined by ::, or a folder. Images are read in place."""
    groups = by_split(shards(source.removeprefix(SHARDS)))
    if len(groups) == 1:
        groups = {"train": next(iter(groups.values()))}
    return Source(source, tuple(groups), lambda split: select(_read(source, groups[split], options), wanted))


def shards(pattern: str) -> list[Path]:
    """Return the files of a pattern, in its order. Raise DataError if there are none or some are missing."""
    found: list[Path] = []
    for part in pattern.split("::"):
        if "://" in part or part.startswith("pipe:"):
            raise DataError(
                f"{SHARDS}{part}: shards are read in place, and have to lie on a disk. Fetch them first, such as "
                "with curl, and give their path; a set of the Hub is streamed as 'hub:NAME' with streaming = true."
            )
        for name in braces(part):
            path = Path(name).expanduser()
            if path.is_dir():
                found += sorted(path.glob("*.tar"))
            elif any(char in name for char in "*?[") and not path.is_file():
                found += sorted(map(Path, glob.glob(str(path))))
            else:
                found.append(path)
    if not found:
        raise DataError(f"no shards at {SHARDS}{pattern}: give a folder of .tar files, or a pattern that fits some.")
    if missing := [str(path) for path in found if not path.is_file()]:
        raise DataError(
            f"{len(missing)} of {counted(len(found), 'shard')} {are(len(missing))} missing: {', '.join(missing[:5])}."
        )
    return list(dict.fromkeys(found))


def braces(pattern: str) -> list[str]:
    """Expand {000..009} and {a,b} as a shell does."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] for part in parts]
    choices[1::2] = map(_choices, parts[1::2])
    if math.prod(map(len, choices)) > MOST:
        raise DataError(f"{SHARDS}{pattern} expands to more than {MOST} shards.")
    return ["".join(each) for each in product(*choices)]


def _choices(inside: str) -> list[str]:
    numbers = RANGE.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    low, high = int(first[-18:]), int(last[-18:])
    if abs(high - low) >= MOST:
        raise DataError(f"{SHARDS}: {{{inside[:80]}}} expands to more than {MOST} shards.")
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}d}" for number in range(low, high + 1) or range(low, high - 1, -1)]


def _read(source: str, paths: list[Path], options: Decoding) -> ImageSet:
    with ThreadPoolExecutor(max_workers=8) as pool:
        indices = list(pool.map(index_of, paths))
    samples: list[tuple[Path, int, Sample]] = []
    for path, (modified, found, _) in zip(paths, indices, strict=True):
        samples += [(path, modified, Sample(*sample)) for sample in found]
    if not samples:
        raise DataError(f"no images in the {counted(len(paths), 'shard')} of {source}. Unpack archives in it.")
    if options.length is not None and options.length > len(samples):
        raise DataError(f"vision.data.length: {options.length} is more than the {len(samples)} images of {source}.")
    bounds = torch.tensor([0, *accumulate(len(found) for _, found, _ in indices)])
    samples = samples[: options.length]
    told = [sample.label for *_, sample in samples]
    labels, names, _ = labels_of(source, ["label"], lambda _: told, None)
    left_out = [each for _, _, others in indices for each in others]
    warn_of_left_out(source, left_out)
    stream = Stream(bounds, options.buffer, forward=False)
    items = [f"{path}: {sample.name}" for path, _, sample in samples]
    return decode_all(source, items, lambda i: _read_sample(*samples[i]), labels, names, options, left_out, stream)


def _read_sample(path: Path, modified: int, sample: Sample) -> bytes:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_mtime_ns != modified:
            raise DataError(f"the shard {path} has changed while it was in use. Start the run again.")
        file.seek(sample.start)
        return file.read(sample.size)


def index_of(path: Path) -> tuple[int, list[Any], list[str]]:
    """Return the time of change of a tar file, its samples in order, and unread images with the reason."""
    try:
        stat = path.stat()
        digest = hashlib.sha256(f"{VERSION}/{stat.st_size}/{stat.st_mtime_ns}/".encode())
        with open(path, "rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, stat.st_size - ENDS))
            digest.update(file.read(ENDS))
        samples, left_out = kept_json("shards", digest.hexdigest(), lambda: _index(path))
        return stat.st_mtime_ns, samples, left_out
    except OSError as error:
        raise DataError(f"the shard {path} cannot be read: {error.strerror or error}.") from error
    except tarfile.TarError as error:
        raise DataError(
            f"the shard {path} is damaged or no plain tar file: {error}. Fetch it again ({LFS}). Images are read in "
            "place, so unpack a compressed one with gunzip (or zstd -d) to NAME.tar."
        ) from error


def _index(path: Path) -> tuple[list[Sample], list[str]]:
    images: dict[str, Sample] = {}
    labels: dict[str, str] = {}
    left_out: list[str] = []
    files: dict[str, tarfile.TarInfo] = {}
    with tarfile.open(path, "r:", tarinfo=CheckedHeader) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stem, _, rest = name.partition(".")
            key, suffix = f"{folder}/{stem}", f".{rest.lower()}"
            is_image = os.path.splitext(f"x{suffix}")[1] in SUFFIXES
            file: tarfile.TarInfo | None = member
            if member.islnk() or member.issym():
                target = posixpath.join(folder * member.issym(), member.linkname)
                file = files.get(posixpath.normpath(target))
                if file is None and is_image:
                    left_out.append(f"{path}: {member.name} (a link to {member.linkname}, which is not before it)")
            if file is None or not file.isreg() or name.startswith("."):
                continue
            files[posixpath.normpath(member.name)] = file
            if is_image:
                found = Sample(member.name, file.offset_data, file.size, None)
                if (first := images.setdefault(key, found)) is not found:
                    # x.jpg is the image of a sample with x.mask.png.
                    images[key], other = sorted((first, found), key=lambda each: each.name.count("."))
                    left_out.append(f"{path}: {other.name} (a second image of the sample {key.removeprefix('/')})")
            elif suffix.endswith(LABELS) or (suffix == ".json" and key not in labels):
                text = archive.extractfile(file).read().decode("utf-8-sig", "replace").strip()  # type: ignore[union-attr]
                label: Any = text or None
                if suffix == ".json":
                    label = _label(text)
                if label is not None:
                    labels[key] = str(label)
    return [image._replace(label=labels.get(key)) for key, image in images.items()], left_out


def _label(text: str) -> int | float | str | None:
    """Return the entry "label" of a JSON object, if it is a number or text."""
    with suppress(ValueError, RecursionError):
        match json.loads(text):
            case {"label": int() | float() | str() as label}:
                return label
    return None
