"""Replay in files of a checkpoint. Each file is written once, and later checkpoints have hard links to it (or copies).

Either folder can be removed. Overwritten parts of the ring are not linked any more.
"""

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.files import file_hash
from dipole.rl.replay import FrameReplayBuffer

_NAME = re.compile(r"replay-\d+-\d+\.npz")
Segment = dict[str, Any]
"""A file as the manifest has it: its name, bytes and sha256, and the steps and planes of each environment in it, from
the first to before the last."""


def write(folder: Path, buffer: FrameReplayBuffer) -> list[Segment]:
    """Write a replay into a folder. Return its files, for `buffer.files` once the folder is in its place."""
    (first, last), planes = buffer._extent
    source, written = buffer.files
    kept = []
    for each in written:
        newer = (last > least for (_, last), (least, _) in zip(each["planes"], planes, strict=True))
        if each["steps"][1] > first or any(newer):
            kept.append(each)
    places = [source / each["file"] for each in kept]
    sizes = [path.stat().st_size if path.is_file() else -1 for path in places]
    if sizes != [each["bytes"] for each in kept] or (kept and kept[0]["steps"][0] > first):
        kept = []  # a file was removed or changed: write everything again
    for each in kept:
        try:
            os.link(source / each["file"], folder / each["file"])
        except OSError:
            shutil.copyfile(source / each["file"], folder / each["file"])
    start = first
    if kept:
        start = kept[-1]["steps"][1]
        planes = tuple((done, end) for (_, done), (_, end) in zip(kept[-1]["planes"], planes, strict=True))
    if start < last or any(begin < end for begin, end in planes):
        path = folder / f"replay-{start:09d}-{last:09d}.npz"
        arrays: dict[str, Any] = buffer._part((start, last), planes)
        np.savez(path, **arrays)
        new = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}
        kept.append({**new, "steps": (start, last), "planes": planes})
    return kept


def read(folder: Path, buffer: FrameReplayBuffer, told: list[Segment]) -> None:
    """Put the files of a manifest into a replay after `load_counters`. Raise CheckpointError for a damaged file."""
    for one, two in pairwise(told):
        if one["steps"][1] != two["steps"][0]:
            raise ValueError(f"{one['file']} and {two['file']} do not follow each other")
    for each in told:
        if file_hash(folder / each["file"]) != each["sha256"]:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: the content of {each['file']} does not match its checksum. Use "
                "another one."
            )
        with np.load(folder / each["file"], allow_pickle=False) as arrays:
            buffer._load_part(arrays, each["steps"], each["planes"])
    buffer.files = folder, told


def sizes(told: Any) -> dict[str, int]:
    """Return names and bytes of the files in a manifest. Raise ValueError for a wrong name."""
    found = {str(each["file"]): int(each["bytes"]) for each in told}
    for name in found:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no part of a replay")
    return found
