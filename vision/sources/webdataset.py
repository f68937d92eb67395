"""Shards in the format of webdataset: tar files whose images are read in place, by an index of their headers."""

import glob
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from dipole.core.utils.errors import DataError
from dipole.core.utils.text import are, counted
from dipole.vision.decoding import Stream
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import SHARDS, Classes, Decoding, Source, register_source
from dipole.vision.sources.images import select_encoded, stay_encoded
from dipole.vision.sources.tar_index import index_of, read_sample

RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000  # shards of a pattern


@register_source(f"shards {SHARDS}train-{{000..009}}.tar", matches=lambda text, path: text.startswith(SHARDS))
def webdataset(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open tar files by pattern: {000..009}, {a,b}, * and ?, several joined by ::, or a folder of them.

    Names before the number tell the splits (train-000.tar, val-000.tar); shards of one name are the split 'train'.
    Nothing is unpacked: an image is read by its offset, so each rank reads only its own.
    """
    groups = _splits(shards(source.removeprefix(SHARDS)))
    return Source(source, tuple(groups), lambda split: _read(source, groups[split], options, wanted))


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
            elif any(char in name for char in "*?["):
                found += sorted(map(Path, glob.glob(str(path))))
            else:
                found.append(path)
    if not found:
        raise DataError(f"no shards at {SHARDS}{pattern}: give a folder of .tar files, or a pattern that fits some.")
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        more = ""
        if len(missing) > 5:
            more = f" and {len(missing) - 5} more"
        raise DataError(
            f"{len(missing)} of {counted(len(found), 'shard')} {are(len(missing))} missing: "
            f"{', '.join(missing[:5])}{more}."
        )
    return list(dict.fromkeys(found))


def braces(pattern: str) -> list[str]:
    """Expand {000..009} and {a,b} as a shell does."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] for part in parts]
    choices[1::2] = map(_choices, parts[1::2])
    count = 1
    for each in choices:
        count *= len(each)
        if count > MOST:
            raise DataError(f"{SHARDS}{pattern} expands to more than {MOST} shards.")
    return ["".join(each) for each in product(*choices)]


def _choices(inside: str) -> list[str]:
    if numbers := RANGE.fullmatch(inside):
        first, last = numbers.groups()
        low, high = int(first[-18:]), int(last[-18:])
        if abs(high - low) >= MOST:
            raise DataError(f"{SHARDS}: {{{inside[:80]}}} expands to more than {MOST} shards.")
        width = 0
        if first.startswith("0") or len(first) == len(last):
            width = len(first)
        return [f"{number:0{width}d}" for number in range(low, high + 1) or range(low, high - 1, -1)]
    return inside.split(",")


def _splits(paths: list[Path]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for path in paths:
        groups.setdefault(re.sub(r"[-_.]?\d+$", "", path.stem) or "train", []).append(path)
    if len(groups) > 1:
        return groups
    return {"train": paths}


def _read(source: str, paths: list[Path], options: Decoding, wanted: Classes) -> ImageSet:
    indices, total = [], 0
    with ThreadPoolExecutor(max_workers=8) as pool:
        for index in pool.map(index_of, paths):
            indices.append(index)
            total += len(index.samples)
    samples = [(path, sample) for path, index in zip(paths, indices, strict=True) for sample in index.samples]
    if not samples:
        raise DataError(f"there are no images in the {counted(len(paths), 'shard')} of {source}.")
    length = options.stream.length
    if length is not None and length > total:
        raise DataError(f"vision.data.length: {source} has {counted(total, 'image')}, fewer than {length}.")
    samples = samples[:length]
    labels, names = _labels(source, [sample.label for _, sample in samples])
    rows, labels, names = select_encoded(source, labels, names, wanted)
    bounds = torch.tensor([0, *accumulate(len(index.samples) for index in indices)])
    return stay_encoded(
        source,
        [f"{path}: {sample.name}" for path, sample in samples],
        lambda i: read_sample(*samples[i]),
        labels,
        names,
        options,
        rows,
        Stream(bounds, options.stream.buffer, forward=False),
        [each for index in indices for each in index.left_out],
    )


def _labels(source: str, told: list[str | None]) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return labels, -1 where missing, and class names. Numbers stay, names are numbered by the alphabet."""
    given = {label for label in told if label is not None}
    if not given:
        return None, ()
    names: tuple[str, ...] = ()
    if all(re.fullmatch(r"-?\d{1,9}", label) for label in given):
        number_of = {label: int(label) for label in given}
    else:
        names = tuple(sorted(given))
        number_of = {name: number for number, name in enumerate(names)}
    return torch.tensor([-1 if label is None else number_of[label] for label in told]), names
