"""Replay in files of a checkpoint. Each file is written once, and later checkpoints link to it.

The files of earlier checkpoints are hard links to the same bytes, so that either folder can be removed. File systems
without links get copies. Overwritten parts of the ring are not linked any more.
"""

import os
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.files import digest
from dipole.rl.replay import FrameReplayBuffer

_NAME = re.compile(r"replay-\d+-\d+\.npz")
_MOST = 64  # files of a replay: with more, the two smallest neighbours are merged


@dataclass(frozen=True)
class Segment:
    """One file.

    Args:
        file: its name in the checkpoint's folder.
        bytes, sha256: of the file.
        steps: numbers of the steps in it, of each environment: the first and the one after the last.
        planes: of each environment the serial numbers of its planes.
        folder: that of the file. It is not in the manifest, as a checkpoint may be moved.
    """

    file: str
    bytes: int
    sha256: str
    steps: tuple[int, int]
    planes: tuple[tuple[int, int], ...]
    folder: Path = field(compare=False)

    def told(self) -> dict[str, Any]:
        """Return its entry in the manifest."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def write(folder: Path, buffer: FrameReplayBuffer) -> tuple[Segment, ...]:
    """Write a replay into a folder. Return its files, for `buffer.files` once the folder is in its place.

    Raises:
        OSError: the disk refused.
    """
    (first, last), planes = buffer.extent
    kept = [each for each in buffer.files if _is_needed(each, first, planes)]
    if not all(_is_there(each) for each in kept) or (kept and kept[0].steps[0] > first):
        kept = []  # a file was removed or changed: write everything again
    linked = [_link(each, folder) for each in kept]
    steps, rest = (first, last), planes
    if kept:
        steps = (kept[-1].steps[1], last)
        rest = tuple((done, end) for (_, done), (_, end) in zip(kept[-1].planes, planes, strict=True))
    if steps[0] < steps[1] or any(start < end for start, end in rest):
        linked.append(_write(folder, buffer, steps, rest))
    while len(linked) > _MOST:
        linked = _joined(folder, buffer, linked)
    return tuple(linked)


def read(folder: Path, buffer: FrameReplayBuffer, told: list[dict[str, Any]]) -> None:
    """Put the files of a manifest into a replay whose `load_counters` has been called.

    Raises:
        CheckpointError: a file is damaged. Other errors of Python's where the manifest is.
    """
    segments = [_segment(folder, each) for each in told]
    for one, two in pairwise(segments):
        if one.steps[1] != two.steps[0]:
            raise ValueError(f"{one.file} and {two.file} do not follow each other")
    for each in segments:
        if digest(folder / each.file) != each.sha256:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: the content of {each.file} does not match its checksum. Use "
                "another one."
            )
        with np.load(folder / each.file, allow_pickle=False) as arrays:
            buffer.load_part(arrays, each.steps, each.planes)
    buffer.files = tuple(segments)


def sizes(told: Any) -> dict[str, int]:
    """Return names and bytes of the files in a manifest. Raise ValueError for a wrong name."""
    found = {str(each["file"]): int(each["bytes"]) for each in told}
    for name in found:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no part of a replay")
    return found


def _segment(folder: Path, told: dict[str, Any]) -> Segment:
    steps = (int(told["steps"][0]), int(told["steps"][1]))
    planes = tuple((int(first), int(last)) for first, last in told["planes"])
    return Segment(str(told["file"]), int(told["bytes"]), str(told["sha256"]), steps, planes, folder)


def _is_needed(segment: Segment, first: int, planes: tuple[tuple[int, int], ...]) -> bool:
    return segment.steps[1] > first or any(
        last > least for (_, last), (least, _) in zip(segment.planes, planes, strict=True)
    )


def _is_there(segment: Segment) -> bool:
    path = segment.folder / segment.file
    return path.is_file() and path.stat().st_size == segment.bytes


def _link(segment: Segment, folder: Path) -> Segment:
    source, target = segment.folder / segment.file, folder / segment.file
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return replace(segment, folder=folder)


def _write(
    folder: Path, buffer: FrameReplayBuffer, steps: tuple[int, int], planes: tuple[tuple[int, int], ...]
) -> Segment:
    path = folder / f"replay-{steps[0]:09d}-{steps[1]:09d}.npz"
    arrays: dict[str, Any] = buffer.part(steps, planes)
    np.savez(path, **arrays)
    return Segment(path.name, path.stat().st_size, digest(path), steps, planes, folder)


def _joined(folder: Path, buffer: FrameReplayBuffer, segments: list[Segment]) -> list[Segment]:
    """The two smallest neighbours as one, so that a long run does not end in a thousand files."""
    place = min(range(len(segments) - 1), key=lambda index: segments[index].bytes + segments[index + 1].bytes)
    one, two = segments[place : place + 2]
    (first, _), live = buffer.extent
    planes = tuple(
        (min(max(start, least), end), end)
        for (start, _), (_, end), (least, _) in zip(one.planes, two.planes, live, strict=True)
    )
    for each in (one, two):
        (folder / each.file).unlink()
    both = _write(folder, buffer, (max(one.steps[0], first), two.steps[1]), planes)
    return [*segments[:place], both, *segments[place + 2 :]]
