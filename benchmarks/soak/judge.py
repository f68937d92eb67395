"""What is looked at in the end: are records, metrics and weights those of a run in peace, is anything left behind?"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dipole.benchmarks.run_records import BENCH, read_records
from dipole.core.record import RunRecord
from dipole.core.train.metrics import read_metrics

SHARED_MEMORY = Path("/dev/shm")
OF_THE_OCCASION = {"started", "updated", "wall_seconds", "training_seconds", "peak_memory_bytes", "peak_device_bytes"}
"""Fields of a record that say when and how long, not what."""
TIME = "time"
"""The field of a line of metrics that says when."""


def differences(undisturbed: Path, runs: Path) -> Iterator[str]:
    """What of a folder of runs is not as in an undisturbed one."""
    wanted, found = read_records(undisturbed), read_records(runs)
    for problem in found.problems:
        yield f"{problem.path.name}: {problem.message[:300]}"
    if missing := wanted.records.keys() - found.records.keys():
        yield f"no record of {', '.join(sorted(missing))}"
    for name in sorted(wanted.records.keys() & found.records.keys()):
        ours, theirs = _numbers(found.records[name]), _numbers(wanted.records[name])
        if odd := sorted(key for key in theirs if ours[key] != theirs[key]):
            yield f"{name}: the record differs in {', '.join(odd)}"
        if _lines(runs / name) != _lines(undisturbed / name):
            yield f"{name}: other lines of metrics"
        yield from _other_files(undisturbed / name, runs / name)


def left_behind(runs: Path, temporary: Path, shared_before: set[str], pids: set[int]) -> Iterator[str]:
    """Temporary files, claims, checkpoints, sockets and shared memory that nobody needs any more.

    Shared memory that was there before, or that bears the number of no process of ours, is somebody else's.
    """
    for path in sorted(runs.rglob("*")):
        place = path.relative_to(runs)
        is_hidden = ".tmp" in path.name or path.name == ".pid"
        is_checkpoint = place.parts[0] != BENCH and "checkpoints" in place.parts
        if is_hidden or is_checkpoint or path.is_socket():
            yield f"left behind: {place}"
    for kind in ("claims/*.json", "stops/*"):
        yield from (f"left behind: {path.relative_to(runs)}" for path in (runs / BENCH).glob(kind))
    yield from (f"left in TMPDIR: {name}" for name in sorted(os.listdir(temporary)))
    for name in sorted(shared_memory() - shared_before):
        if any(int(digits) in pids for digits in re.findall(r"\d{2,7}", name)):
            yield f"left in shared memory: {name}"


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _numbers(record: RunRecord) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude=OF_THE_OCCASION)


def _lines(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != TIME} for line in read_metrics(run / "metrics.jsonl")]


def _other_files(undisturbed: Path, run: Path) -> Iterator[str]:
    """Files of the model and of the evaluation that are missing, additional, or have other contents."""
    ours, theirs = _digests(run), _digests(undisturbed)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{run.name}: {name} is {'missing' if name in theirs else 'more than there should be'}"
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            yield f"{run.name}: {name} has other contents"


def _digests(run: Path) -> dict[str, str]:
    compared = (path for path in run.rglob("*") if path.is_file() and not path.name.startswith("."))
    own = {"record.json", "metrics.jsonl"}  # compared by what they say
    return {
        path.relative_to(run).as_posix(): _digest(path)
        for path in compared
        if path.name not in own and "checkpoints" not in path.relative_to(run).parts
    }


def _digest(path: Path) -> str:
    """Hash of a file's content; of arrays, whose files hold times and orders of their own, of names and values."""
    content = path.read_bytes()
    arrays: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        from safetensors.numpy import load

        arrays = load(content)
    elif path.suffix == ".npz":
        import numpy as np

        with np.load(path, allow_pickle=False) as found:
            arrays = dict(found)
    each = [
        f"{name} {arrays[name].dtype} {arrays[name].shape} {_hash(arrays[name].tobytes())}" for name in sorted(arrays)
    ]
    return _hash("\n".join(each).encode() if arrays else content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
